"""JSON lines: one object a line, each line handed to the system whole.

An interruption can tear the last line of a file. Every reader skips such a line and every writer
drops it; any other line that is no JSON object is damage, which strict readers refuse by its number
and `salvage` leaves out.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import ClearheadError
from clearhead.records.files import SAVE, require_regular, writing
from clearhead.terminal import say

Record = dict[str, Any]


def encode(record: Record) -> str:
    """A record as its line, newline and all.

    Numbers that are not finite become null, with a "reason"; arrays and tensors become lists, and
    what JSON does not know, such as a path, becomes text.
    """
    problems: list[str] = []
    clean = _finite(record, "", problems)
    if problems:
        clean.setdefault("reason", "; ".join(problems))
    return json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n"


def append(path: Path, *records: Record) -> None:
    """Append the lines of records to `path` at once, creating the file and its folder.

    A last line torn by an interruption is dropped first, so that it never ends up in the middle of
    the file.

    Raises:
        ClearheadError: naming the file, where it cannot be written.
    """
    lines = _bytes("".join(map(encode, records)))
    with writing(path, "make room or choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            _mend(file)
            _write_all(file, lines)


class Writer:
    """A file of lines held open, to which each line is appended as it comes.

    Unbuffered: a killed process loses no line, and closing after a failed write does not fail
    again.

    Args:
        afterwards: what to do once there is room again, for the error.

    Raises:
        ClearheadError: from any method, naming the file and what would work.
    """

    def __init__(self, path: Path, afterwards: str) -> None:
        self._path, self._afterwards = path, afterwards
        with self._writing():
            self._file = path.open("ab", buffering=0)

    def write(self, lines: str) -> None:
        """Append whole lines."""
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            there = False
        if not there:
            raise ClearheadError(
                f"{self._path} was deleted, moved or replaced while it was being written: put it "
                f"back with its folder and {self._afterwards}, or start anew in another folder"
            )
        with self._writing():
            _write_all(self._file, _bytes(lines))

    def close(self) -> None:
        """Close the file."""
        with self._writing():
            self._file.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._path, f"make room and {self._afterwards}")


def read(path: Path, *, what: str = "record") -> list[Record]:
    """Every record of a file; see `each`."""
    records: list[Record] = []
    each([path], records.append, what=what)
    return records


def each(paths: Iterable[Path], add: Callable[[Record], None], *, what: str = "record") -> None:
    """Hand every record of the files to `add`.

    Args:
        what: noun for a line, for the error.

    Raises:
        ClearheadError: naming file and line, for anything that is not a record or that `add`
            refuses by a ClearheadError, ValueError, KeyError, TypeError or AttributeError.
    """
    for path in paths:
        for line in _lines(path):
            problem: object = line.problem
            if line.record is not None:
                try:
                    add(line.record)
                    continue
                except KeyError as error:
                    problem = f"lacks {error}"
                except (ClearheadError, ValueError, TypeError, AttributeError) as error:
                    problem = error
            raise ClearheadError(f"{path}, line {line.number}: not a {what}: {problem}")


def first(path: Path) -> Record | None:
    """A file's first record, by which files of one kind are known; None where there is none."""
    try:
        return next(_lines(path)).record
    except (ClearheadError, StopIteration):
        return None


def salvage(path: Path, until: int | None = None) -> list[Record]:
    """Every intact record of a file of steps, in order. Damaged lines are left out and named.

    Intact is an object whose whole number "step" fits into the order of the others.

    Args:
        until: the last step wanted; lines of later steps are left out without a word.
    """
    if not path.exists():
        return []
    lines = list(_lines(path))
    steps = [None if line.record is None else line.record.get("step") for line in lines]
    ordered = _ordered(steps)
    damaged = [str(line.number) for place, line in enumerate(lines) if place not in ordered]
    if damaged:
        named = ", ".join(damaged[:3]) + ", …" * (len(damaged) > 3)
        say(f"{path}: line {named} is damaged and left out; the others are kept")
    kept = [line.record for place, line in enumerate(lines) if place in ordered]
    return [record for record in kept if record and (until is None or record["step"] <= until)]


class _Line(NamedTuple):
    number: int
    record: Record | None
    problem: str


def _lines(path: Path) -> Iterator[_Line]:
    """Every line but blank ones and a last one torn by an interruption."""
    require_regular(path, SAVE)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ClearheadError(f"cannot read records from {path}: {error.strerror}") from error
    # By newlines alone: other line separators may stand inside a JSON string.
    lines = content.split(b"\n")
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        if number == len(lines) and _is_torn(text):
            return
        yield _Line(number, *_parse(text))


def _parse(line: bytes) -> tuple[Record | None, str]:
    """The object in a line, or None and the reason why there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    if not isinstance(record, dict):
        return None, f"expected an object, found {type(record).__name__}"
    return record, ""


def _ordered(steps: Sequence[Any]) -> set[int]:
    """Places of the longest sequence of whole numbers that never falls (patience sorting)."""
    ends: list[int] = []  # the smallest last step of a sequence of each length
    places: list[int] = []
    before: dict[int, int | None] = {}
    for place, step in enumerate(steps):
        if not isinstance(step, int):
            continue
        length = bisect_right(ends, step)
        ends[length : length + 1] = [step]
        places[length : length + 1] = [place]
        before[place] = places[length - 1] if length else None
    found: set[int] = set()
    last = places[-1] if places else None
    while last is not None:
        found.add(last)
        last = before[last]
    return found


def _is_torn(end: bytes) -> bool:
    """True if what follows the last newline is the beginning of a record, or was never written."""
    return end[:1] in (b"{", b"\0") and _parse(end)[0] is None


def _mend(file: Any) -> None:
    """Bring a file whose last line has no end back to whole lines."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    start = content.rfind(b"\n") + 1
    if _is_torn(content[start:]):
        file.truncate(start)
    else:
        _write_all(file, b"\n")


def _write_all(file: Any, content: bytes) -> None:
    """An unbuffered write may take only a part, where room ends for one."""
    while content:
        content = content[file.write(content) :]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="backslashreplace")


def _finite(value: Any, name: str, problems: list[str]) -> Any:
    """A copy of `value` that JSON can hold; what could not be kept is named in `problems`."""
    if isinstance(value, dict):
        return {
            str(key): _finite(item, f"{name}.{key}" if name else str(key), problems)
            for key, item in value.items()
        }
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
