"""Packages that add mechanisms and presets, imported by every process of a command."""

import importlib
import os
import sys

from clearhead.errors import ClearheadError

VARIABLE = "CLEARHEAD_IMPORT"  # packages with commas between; a command's processes inherit it
GROUP = "clearhead.extensions"  # of the entry points of installed packages
_OPTION = "--import"


def taken_from(line: list[str]) -> list[str]:
    """Remove `--import PACKAGE` from a command line, and store PACKAGE in the environment."""
    end = line.index("--") if "--" in line else len(line)
    options, others = iter(line[:end]), list[str]()
    packages = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    for word in options:
        name, equals, value = word.partition("=")
        if name != _OPTION:
            others.append(word)
            continue
        value = value if equals else next(options, "")
        if not value or value.startswith("-"):
            raise ClearheadError(f"{_OPTION} names no package: give one, such as my_package")
        packages += [one for one in value.split(",") if one not in packages]
    if packages:
        os.environ[VARIABLE] = ",".join(packages)
    return [*others, *line[end:]]


def load() -> None:
    """Import the packages of `--import` and CLEARHEAD_IMPORT, and the installed extensions."""
    from importlib.metadata import entry_points  # quick help needs none

    named = filter(None, os.environ.get(VARIABLE, "").split(","))
    for name in (*named, *(point.module for point in entry_points(group=GROUP))):
        # A package of the current folder is found, and afterwards nothing else that lies there.
        if added := "" not in sys.path:
            sys.path.append("")
        try:
            importlib.import_module(name)
        except ClearheadError:
            raise
        except Exception as error:  # of code that is not ours
            raise ClearheadError(
                f"cannot import {name} ({type(error).__name__}: {error}): give a package that is "
                "installed, in the current folder or on PYTHONPATH"
            ) from error
        finally:
            if added:
                sys.path.remove("")
