"""Readers of texts: one for each file format, and one for data sets of the hub.

Files do not come through `datasets` (5.2), so that texts stay the same: its text reader turns
"\\r\\n" into "\\n", its JSON reader parses dates and refuses fields that come late, and its Parquet
reader gives what is left of some damaged files, in five times the time and three times the memory.
"""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from clearhead.errors import ClearheadError, first_line
from clearhead.records.files import SAVE, read_json, require_regular, write_json

HUB = "hf:"  # before the name of a data set
JSON_LINES, PARQUET = ".jsonl", ".parquet"
TEXT = (".txt", ".md", ".py")
ENDINGS = "a .txt, .md, .py or .jsonl file (also as .gz) or a .parquet file"

# A longer text file is cut, so that no one file sets the memory that reading takes.
LONGEST_TEXT = 16 << 20
# A text file that is named by itself is cut into about so many pseudo-documents, so that
# there is something to hold out.
PIECES = 256
SHORTEST_PIECE, LONGEST_PIECE = 1 << 10, 64 << 10


class UndecodableError(ClearheadError):
    """A text file that is not UTF-8: an error if the user named it; in a folder it is skipped."""


def ending(name: str) -> str:
    """The suffix that names the format: `.txt` for both `a.txt` and `a.TXT.gz`."""
    return os.path.splitext(name.lower().removesuffix(".gz"))[1]


def readable(name: str) -> bool:
    """True if there is a reader for files of this name."""
    return ending(name) in (*TEXT, JSON_LINES) or name.lower().endswith(PARQUET)


def read(path: Path, text_field: str, *, in_pieces: bool = False) -> Iterator[str]:
    """Yield the texts of a file in order, empty ones too; a long text file comes `in_pieces`."""
    kind = ending(path.name)
    if kind == JSON_LINES:
        return (text_of(row, text_field, where) for where, row in json_rows(path))
    return _parquet(path, text_field) if kind == PARQUET else _text(path, in_pieces)


def value_of(row: Any, field: str, where: str, option: str = "--data.text-field") -> Any:
    """The value of a row's field; errors name the place, `where`, and the `option` to give."""
    if not isinstance(row, dict):
        raise ClearheadError(f"{where}: expected a JSON object, found a {type(row).__name__}")
    if field not in row:
        fields = ", ".join(map(repr, row)) or "no field at all"
        raise ClearheadError(
            f"{where}: no field {field!r}, it has {fields}; name the one meant with {option}"
        )
    return row[field]


def text_of(row: Any, field: str, where: str, option: str = "--data.text-field") -> str:
    """The text in a row's field, "" for null; lone surrogates, which UTF-8 lacks, become U+FFFD."""
    text = value_of(row, field, where, option)
    if text is not None and not isinstance(text, str):
        raise ClearheadError(
            f"{where}: field {field!r} holds a {type(text).__name__}, not a string"
        )
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_stream(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """Cut bytes after line ends, long lines between characters, into pieces of up to `size` ≥ 4."""
    held = b""
    while block := stream.read(size - len(held)):
        held += block
        if len(held) == size:
            cut = held.rfind(b"\n") + 1
            # The last character of a line without end may be incomplete: it has at most 4 bytes.
            places = range(size - 1, max(size - 4, 1) - 1, -1)
            cut = cut or next((place for place in places if held[place] & 0xC0 != 0x80), size)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _text(path: Path, in_pieces: bool) -> Iterator[str]:
    offset, size = 0, LONGEST_TEXT
    with _opened(path) as stream:
        if in_pieces:
            length = len(stream.read(PIECES * LONGEST_PIECE))  # beyond it pieces grow no more
            size = max(length // PIECES, SHORTEST_PIECE)
            stream.seek(0)
        for piece in cut_stream(stream, size):
            text, bad = "", piece.find(b"\0")
            try:
                text = piece.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = error.start if bad < 0 else bad
            if bad >= 0:
                raise UndecodableError(
                    f"{path}: byte 0x{piece[bad]:02x} at offset {offset + bad} is not UTF-8 "
                    "text; convert the file to UTF-8"
                )
            yield text if offset else text.removeprefix("\ufeff")
            offset += len(piece)
    if not offset:
        yield ""


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for every line of a .jsonl or .jsonl.gz file."""
    with _opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise ClearheadError(f"{where}: not JSON ({error})") from error
                yield where, row


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow.parquet

    number = 0
    # Without pre_buffer a row group is not loaded whole before its first batch.
    options: Any = {"pre_buffer": False, "page_checksum_verification": True}
    try:
        with _opened(path) as file, pyarrow.parquet.ParquetFile(file, **options) as table:
            value_of(dict.fromkeys(table.schema_arrow.names), text_field, str(path))
            for batch in table.iter_batches(batch_size=64, columns=[text_field]):
                for row in batch.to_pylist():
                    number += 1
                    yield text_of(row, text_field, f"{path}, row {number}")
            if number != (rows := table.metadata.num_rows):
                raise ClearheadError(f"{path}: not a whole .parquet file ({number} of {rows} rows)")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # writers do not check texts
        raise ClearheadError(
            f"{path}, after row {number}: not a whole .parquet file ({first_line(error)})"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked if it is packed; an error of the system or of gzip is one line."""
    require_regular(path, SAVE)
    unpacked = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with cast(IO[bytes], unpacked(path, "rb")) as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ClearheadError(f"{path}: not a whole gzip file ({error})") from error
    except OSError as error:
        raise ClearheadError(f"{path}: cannot be read ({error.strerror or error})") from error


def pinned_revision(spec: str, cache: Path, progress: Callable[[str], None]) -> str | None:
    """A data set's revision, queried from the hub at its first use and then read from `cache`;
    None for a local folder."""
    name, _, _ = _parse_hub(spec)
    if Path(name).is_dir():
        return None
    path = cache / "hub" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    if path.exists():
        known = read_json(path, "delete it to ask the hub again")
        if isinstance(revision := known.get("revision"), str):
            return revision
    from huggingface_hub import HfApi

    with _explained(spec):
        revision = HfApi().dataset_info(name).sha
    write_json(path, {"data set": name, "revision": revision})
    progress(f"{spec}: pinned to revision {revision}")
    return str(revision)


def hub_rows(
    spec: str, revision: str | None, *, keep: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for every row of a data set, in order; a class is given by its name where
    the data set names its classes. To `keep` it, `datasets` downloads the whole and maps it into
    memory; else, and from a local folder, which may change, rows are streamed."""
    import datasets

    name, subset, split = _parse_hub(spec)
    streaming = not keep or revision is None
    with _explained(spec):
        rows = datasets.load_dataset(
            name, subset, split=split, streaming=streaming, revision=revision
        )
        features = getattr(rows, "features", None) or {}
        named = {field: kind.names for field, kind in features.items() if hasattr(kind, "names")}
        for number, row in enumerate(rows, start=1):
            for field, names in named.items():
                if isinstance(row[field], int) and 0 <= row[field] < len(names):
                    row = {**row, field: names[row[field]]}
            yield f"{spec}, row {number}", row


def _parse_hub(spec: str) -> tuple[str, str | None, str]:
    """Parse `hf:name[:config][#split]` into name, config or None, and split, by default "train"."""
    body, _, split = spec.removeprefix(HUB).partition("#")
    name, _, config = body.partition(":")
    if not name:
        raise ClearheadError(f"data {spec!r}: no name; write hf:NAME, hf:NAME:CONFIG#SPLIT")
    return name, config or None, split or "train"


@contextmanager
def _explained(spec: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the network, a format, a script: they share no base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ClearheadError(f"data {spec!r} cannot be loaded from the hub: {reason}") from error
