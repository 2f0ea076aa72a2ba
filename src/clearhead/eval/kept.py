"""Texts and verdicts in a file, each as it is made, so that no work is done twice."""

import hashlib
import json
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records import jsonl


class Kept:
    """JSON lines by their "key", which says all that decides what is in them.

    Args:
        path: the file, which need not be there yet; None keeps lines in memory only. What an
            interruption tore off its end is dropped.

    Raises:
        ClearheadError: a file that holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            jsonl.each([path], self._know, what="text or verdict that was kept")
        except ClearheadError as error:
            raise ClearheadError(f"{error}: move the file away") from error

    @property
    def advice(self) -> str:
        """What is left of the work when it stops here, in words."""
        if self._path is None:
            return "nothing was kept: give --records to go on from what is done"
        return f"what is written and judged is in {self._path}, and the same command goes on"

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def line(self, key: str) -> dict[str, Any]:
        """The line of a key that is there."""
        return self._lines[key]

    def add(self, key: str, **line: Any) -> None:
        """Keep a line.

        Raises:
            ClearheadError: where the file cannot be written.
        """
        self._lines[key] = {"key": key, **line}
        if self._path is not None:
            jsonl.append(self._path, self._lines[key])

    def _know(self, line: dict[str, Any]) -> None:
        self._lines[str(line["key"])] = line


def key_of(*parts: Any) -> str:
    """A key that tells these parts from any others."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
