"""The option of every job that opens a model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OpensModels:
    """Of every verb that opens a model."""

    trust_remote_code: bool = False
    """Run Python code that the model's folder or repository brings. Read it first."""
