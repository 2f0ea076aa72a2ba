"""The papers' experiments: one function each, the intervention marked; and what runs them."""
