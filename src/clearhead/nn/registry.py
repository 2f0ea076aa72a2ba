"""The registry of mechanisms, which `clearhead.nn` fills. Other packages add theirs."""

from clearhead.spec import Declaration, Registry

REGISTRY = Registry()


def register(declaration: Declaration) -> None:
    """Add a mechanism of another package, the one in which its `build` is defined.

    Models with the mechanism name the package in their configuration's `requires`.
    """
    build = getattr(declaration.build, "func", declaration.build)  # a partial's module is functools
    REGISTRY.add(declaration, build.__module__.partition(".")[0])
