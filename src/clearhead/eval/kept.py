"""Texts and verdicts in a file, each as it is made, so that no work is done twice."""

import hashlib
import json
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError


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
        self._whole = 0  # bytes of whole lines
        if path is None or not path.exists():
            return
        content = path.read_bytes()
        self._whole = content.rfind(b"\n") + 1
        for number, text in enumerate(content[: self._whole].splitlines(), start=1):
            try:
                line = json.loads(text)
                self._lines[line["key"]] = line
            except (ValueError, KeyError, TypeError) as error:
                raise ClearheadError(
                    f"{path}, line {number} is no text or verdict that was kept: move the file away"
                ) from error

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
        if self._path is None:
            return
        text = json.dumps(self._lines[key], ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.truncate(self._whole)
                self._whole += file.write(text.encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            raise ClearheadError(f"cannot write {self._path}: {error.strerror}") from error


def key_of(*parts: Any) -> str:
    """A key that tells these parts from any others."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
