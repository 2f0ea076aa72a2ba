"""Whole jobs: comparisons and benchmarks. Everything below is wired together here."""
