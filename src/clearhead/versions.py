"""Versions of the software that made a record."""

import platform

__version__ = "0.1.0"
"""The version of clearhead."""

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "triton")


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python, clearhead, the libraries below it and `packages`, by name, without
    those that are not installed, such as triton without a GPU."""
    from importlib.metadata import PackageNotFoundError, version

    numbers = {"python": platform.python_version(), "clearhead": __version__}
    for name in (*_LIBRARIES, *packages):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers
