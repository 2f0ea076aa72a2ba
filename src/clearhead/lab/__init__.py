"""Whole jobs: comparisons, evaluations, fine-tuning, diagnosis, quantisation."""
