"""What a record says of the software that made it."""

__version__ = "0.1.0"


def versions(*packages: str) -> dict[str, str]:
    """The version of clearhead, torch, transformers and `packages`, each by its name.

    clearhead's own is known where it runs from its source without being installed, too.

    Raises:
        PackageNotFoundError: for another package that is not installed.
    """
    from importlib.metadata import version

    others = {name: version(name) for name in ("torch", "transformers", *packages)}
    return {"clearhead": __version__, **others}
