"""The registry of mechanisms, which `clearhead.nn.mechanisms` fills. Other packages add theirs."""

import sys

from clearhead.spec import Declaration, Registry

REGISTRY = Registry()
"""The values of every axis, with the modules that implement them."""


def register(declaration: Declaration) -> None:
    """Add a mechanism of another package; call it from a module of that package.

    Models with the mechanism name the package in their configuration's `requires`.

    Raises:
        ClearheadError: an unknown axis, or a name that is taken or not allowed.
    """
    package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
    REGISTRY.add(declaration, package)
