"""The registry of mechanisms, which `clearhead.nn.mechanisms` fills. Other packages add theirs."""

import sys

from clearhead.spec import Declaration, Registry

REGISTRY = Registry()
"""The values of every axis, with the modules that implement them."""


def register(declaration: Declaration) -> None:
    """Add a mechanism of another package, which is the module that calls this.

    Models with it name the package in their configuration's `requires`.

    Raises:
        ClearheadError: the axis or the name of the mechanism does not fit.
    """
    package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
    REGISTRY.add(declaration, package)
