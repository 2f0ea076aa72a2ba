"""Consent to the Python code that a model brings, as an option."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OpensModels:
    """The option of every verb that opens a model."""

    trust_remote_code: bool = False
    """Run Python code that the model's folder or repository brings. Read it first."""
