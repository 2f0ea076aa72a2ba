"""Files of JSON lines, read a line at a time by whoever knows what a line means."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError


def read_lines(paths: Iterable[Path], add: Callable[[dict[str, Any]], None], *, what: str) -> None:
    """Hand every line of the files to `add`; `what` they are records of is for the error.

    Raises:
        ClearheadError: naming file and line, for anything that is not JSON or that `add` refuses
            by a ClearheadError, ValueError, KeyError, TypeError or AttributeError.
    """
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ClearheadError(f"cannot read records from {path}: {error.strerror}") from error
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                add(json.loads(line))
            except (ClearheadError, ValueError, KeyError, TypeError, AttributeError) as error:
                detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise ClearheadError(
                    f"{path}, line {number}: not a record of a {what}: {detail}"
                ) from error


def first_kind(path: Path) -> str | None:
    """The kind of a file's first record, by which files of one kind are known; None: no record."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return str(first.get("kind")) if isinstance(first, dict) else None
