"""Streaming readers of texts, one for each file format, with one text and a block in memory.

`datasets` reads the hub's rows (`hub`) but no files: its JSON reader (5.2) refuses fields that the
first 10 MB lack, and lone surrogates, and parses texts that are all dates as dates.
"""

import difflib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from clearhead.errors import ClearheadError, first_line
from clearhead.records.files import SAVE, require_regular

JSON_LINES, PARQUET = ".jsonl", ".parquet"
TEXT = (".txt", ".md", ".py")
ENDINGS = "a .txt, .md, .py or .jsonl file (also as .gz) or a .parquet file"

# A line above this is refused: a few packed bytes may hold gigabytes.
LONGEST_LINE = 64 << 20
# A text file above this is cut, so that no one file sets the memory that reading takes.
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
        near = difflib.get_close_matches(field, list(row), n=1) or ["NAME"]
        fields = ", ".join(map(repr, row)) or "no field at all"
        raise ClearheadError(
            f"{where}: no field {field!r}, it has {fields}; name the one meant with {option} "
            f"{near[0]}"
        )
    return row[field]


def text_of(row: Any, field: str, where: str, option: str = "--data.text-field") -> str:
    """The text in a row's field.

    A lone surrogate, possible in JSON but not in UTF-8, becomes U+FFFD; null is not text.
    """
    text = value_of(row, field, where, option)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ClearheadError(
            f"{where}: field {field!r} holds a {type(text).__name__}, not a string"
        )
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_stream(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """Cut bytes after a line end into pieces of at most `size`; a longer line, between characters.

    `size` is at least 4, the bytes of the longest character.
    """
    held = b""
    while block := stream.read(size - len(held)):
        held += block
        if len(held) == size:
            cut = held.rfind(b"\n") + 1 or _character_start(held)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _character_start(data: bytes) -> int:
    """The last offset above 0 and within 4 bytes of the end at which a UTF-8 character starts."""
    offsets = range(len(data) - 1, max(len(data) - 4, 1) - 1, -1)
    return next((offset for offset in offsets if data[offset] & 0xC0 != 0x80), len(data))


def _text(path: Path, in_pieces: bool) -> Iterator[str]:
    offset, size = 0, LONGEST_TEXT
    with _opened(path) as stream:
        if in_pieces:
            length = len(stream.read(PIECES * LONGEST_PIECE))  # beyond it pieces grow no more
            size = max(length // PIECES, SHORTEST_PIECE)
            stream.seek(0)
        for piece in cut_stream(stream, size):
            if (nul := piece.find(b"\0")) >= 0:
                raise UndecodableError(
                    f"{path}: a NUL byte at offset {offset + nul}: this is binary data, not text"
                )
            try:
                text = piece.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UndecodableError(
                    f"{path}: byte 0x{piece[error.start]:02x} at offset {offset + error.start} is "
                    "not UTF-8; convert the file to UTF-8"
                ) from error
            yield text if offset else text.removeprefix("\ufeff")
            offset += len(piece)
    if not offset:
        yield ""


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for every line of a .jsonl or .jsonl.gz file."""
    with _opened(path) as stream:
        lines = iter(lambda: stream.readline(LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise ClearheadError(
                    f"{where}: longer than {LONGEST_LINE >> 20} MiB: give each text its own line"
                )
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ClearheadError(f"{where}: byte {error.start} of it is not UTF-8") from error
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
    except UnicodeDecodeError as error:  # writers of .parquet files do not check
        raise ClearheadError(
            f"{path}, rows {number + 1} to {number + 64}: a text is not UTF-8 ({error.reason})"
        ) from error
    except pyarrow.ArrowException as error:
        raise ClearheadError(f"{path}: not a whole .parquet file ({first_line(error)})") from error


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
