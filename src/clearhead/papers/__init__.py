"""The papers' experiments, one function each, their claims, and the code that runs them."""
