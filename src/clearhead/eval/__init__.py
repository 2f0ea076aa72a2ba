"""Evaluations: perplexity, retrieval, masked tokens, and tasks of lm-eval."""
