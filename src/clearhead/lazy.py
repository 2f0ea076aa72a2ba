"""Names of a package that are imported at their first use, so that importing it stays quick."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package that imports its names for type checkers only, as in
    `from a import b as b`: what type checkers see and what is imported cannot differ."""
    source = inspect.getsource(sys.modules[package])
    modules = {
        name.name: statement.module
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for name in statement.names
        if name.asname == name.name
    }

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return find, sorted(modules)
