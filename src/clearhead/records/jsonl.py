"""JSON lines. An incomplete last line, as a killed process leaves it, is skipped by readers and
removed by writers; any other line that is not a JSON object is refused."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import SAVE, require_regular, writing

Record = dict[str, Any]


def encode(record: Record) -> str:
    """A record as a line of JSON, with its newline. Numbers that are not finite become null, with a
    "reason"; arrays and tensors become lists, and other types that JSON lacks become text."""
    problems: dict[str, None] = {}
    clean = _finite(record, "", problems)
    if problems:
        clean.setdefault("reason", "; ".join(problems))
    return json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n"


def append(path: Path, *records: Record) -> None:
    """Append records to a file, made if missing, in one write that reaches the disk."""
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
    records = read(path) if path.exists() else []
    return [one for one in records if until is None or one["step"] <= until]


def each(path: Path, add: Callable[[Record], None]) -> None:
    """Call `add` with every record of a file; a ClearheadError names the line that is none."""
    require_regular(path, SAVE)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ClearheadError(f"cannot read records from {path}: {error.strerror}") from error
    # By newlines alone: other line separators may stand inside a JSON string.
    *lines, last = content.split(b"\n")
    if not _is_torn(last):
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, found {type(record).__name__}")
            add(record)
        except (ClearheadError, KeyError, ValueError, TypeError, RecursionError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ClearheadError(f"{path}, line {number}: not a record: {reason}") from error


def _is_torn(end: bytes) -> bool:
    """True if what follows the last newline is the beginning of a record, or was never written."""
    try:
        json.loads(end)
    except (ValueError, RecursionError):
        return end[:1] in (b"{", b"\0")
    return False


def put(file: int, text: str) -> None:
    content = text.encode("utf-8", errors="backslashreplace")
    while content:  # a write takes only a part where room ends
        content = content[os.write(file, content) :]


def _finite(value: Any, name: str, problems: dict[str, None]) -> Any:
    """A copy of `value` that JSON can hold; what could not be kept is named in `problems`."""
    if isinstance(value, dict):
        at = f"{name}." if name else ""
        return {str(key): _finite(item, f"{at}{key}", problems) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, name, problems) for item in value]
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return _finite(value.tolist(), name, problems)
    if isinstance(value, float) and not math.isfinite(value):
        problems[f"{name} was {value}"] = None
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
