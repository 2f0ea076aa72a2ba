"""JSON lines: one object per line, each line written in a single call.

A killed process can leave the last line incomplete. Readers skip such a line and writers remove it;
any other line that is not a JSON object is refused, naming its number.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import SAVE, require_regular, writing

Record = dict[str, Any]


def encode(record: Record) -> str:
    """A record as a line of JSON, with its newline.

    Numbers that are not finite become null, with a "reason"; arrays and tensors become lists, and
    other types that JSON lacks, such as paths, become text.
    """
    problems: list[str] = []
    clean = _finite(record, "", problems)
    if problems:
        clean.setdefault("reason", "; ".join(problems))
    return json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n"


def append(path: Path, *records: Record) -> None:
    """Append the lines of records to `path` in one write that reaches the disk.

    The file and its folder are made where they are missing; a torn last line is dropped.

    Raises:
        ClearheadError: naming the file, where it cannot be written.
    """
    with writing(path, "make room or choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
            content = b"" if file.read(1) in (b"", b"\n") else path.read_bytes()
            start = content.rfind(b"\n") + 1
            if _is_torn(content[start:]):
                file.truncate(start)
            elif content:
                put(file.fileno(), "\n")
            put(file.fileno(), "".join(map(encode, records)))
            os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """Every record of a file; see `each`."""
    records: list[Record] = []
    each(path, records.append)
    return records


def steps(path: Path, until: int | None = None) -> list[Record]:
    """The records of a file of steps, up to step `until`; none where there is no file."""
    records: list[Record] = []

    def add(line: Record) -> None:
        if not isinstance(line["step"], int):
            raise ValueError(f"its step is {line['step']!r}, not a whole number")
        records.append(line)

    try:
        if path.exists():
            each(path, add, what="step")
    except ClearheadError as error:
        raise ClearheadError(f"{error}: mend that line, or delete it") from error
    return [line for line in records if until is None or line["step"] <= until]


def each(path: Path, add: Callable[[Record], None], *, what: str = "record") -> None:
    """Call `add` with every record of a file.

    Raises:
        ClearheadError: naming file, line and `what` (the expected kind of line), for a line that is
            not a record, or for which `add` raises a ValueError or TypeError.
    """
    for number, line in _lines(path):
        try:
            add(_record(line))
        except KeyError as error:
            raise ClearheadError(f"{path}, line {number}: not a {what}: lacks {error}") from error
        except (ClearheadError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ClearheadError(f"{path}, line {number}: not a {what}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line by its number, but blank ones and a torn last one."""
    require_regular(path, SAVE)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ClearheadError(f"cannot read records from {path}: {error.strerror}") from error
    # By newlines alone: other line separators may stand inside a JSON string.
    *lines, last = content.split(b"\n")
    if not _is_torn(last):
        lines.append(last)
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _record(line: bytes) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    return record


def _is_torn(end: bytes) -> bool:
    """True if what follows the last newline is the beginning of a record, or was never written."""
    try:
        return end[:1] in (b"{", b"\0") and not _record(end)
    except (ValueError, RecursionError):
        return True


def put(file: int, text: str) -> None:
    content = text.encode("utf-8", errors="backslashreplace")
    while content:  # a write takes only a part where room ends
        content = content[os.write(file, content) :]


def _finite(value: Any, name: str, problems: list[str]) -> Any:
    """A copy of `value` that JSON can hold; what could not be kept is named in `problems`."""
    if isinstance(value, dict):
        named = {str(key): item for key, item in value.items()}
        at = f"{name}." if name else ""
        return {key: _finite(item, at + key, problems) for key, item in named.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, name, problems) for item in value]
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return _finite(value.tolist(), name, problems)
    if isinstance(value, float) and not math.isfinite(value):
        problem = f"{name} was {value}"
        if problem not in problems:
            problems.append(problem)
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)
