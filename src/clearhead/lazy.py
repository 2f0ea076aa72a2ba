"""Names of a package that are imported at their first use, so that importing it stays quick."""

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def lazily(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose `__init__` imports its names for type checkers only.

    Those imports, under `if TYPE_CHECKING`, are read from its source: what
    type checkers see and what is imported cannot differ.
    """
    spec = find_spec(package)
    assert spec is not None
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    modules = {
        name.asname or name.name: statement.module
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for name in statement.names
    }

    def find(name: str) -> Any:
        module = modules.get(name, "")
        if not module.startswith("clearhead."):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return find
