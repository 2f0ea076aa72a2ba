"""Tokenisation of a corpus into shards, document by document."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.data import journal, shards
from clearhead.data import tokenizer as tokenizers
from clearhead.data.corpus import SPLITS
from clearhead.data.scan import CorpusScan, sample
from clearhead.data.sources import Source
from clearhead.errors import ClearheadError

# Text that is in the tokenizer at once: an id costs it about 100 bytes of bookkeeping, so these
# keep a build at a few hundred MB however large the corpus or a document.
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 20
# Text after which the journal gets a mark: about what an interruption costs.
_MARK_BYTES = 64 << 20
_ENCODERS = 2  # threads that call the tokenizer, which has threads of its own

Progress = Callable[[str], None]


class ChangedError(ClearheadError):
    """Text that changed after it was scanned, or after a run began."""


def _train(sources: tuple[Source, ...], found: CorpusScan, vocabulary: int, say: Progress) -> Any:
    say(f"training a byte-level BPE of {vocabulary:,} entries")
    return tokenizers.train(sample(sources, found), vocabulary)


def build(
    folder: Path,
    content: str,
    given: Any,
    vocabulary: int,
    sources: tuple[Source, ...],
    found: CorpusScan,
    say: Progress,
) -> None:
    """Tokenise everything into `folder`, or what an interrupted build left to do, and seal it."""
    from clearhead.models.loading import save_tokenizer

    names, place = shards.names(len(sources)), folder / "tokenizer"
    marks = journal.Journal(folder, names, shards.digest_of_folder(place))
    if marks.mark is None:
        tokenizer = given if given is not None else _train(sources, found, vocabulary, say)
        save_tokenizer(tokenizer, place)
        marks = journal.Journal(folder, names, shards.digest_of_folder(place))
    else:
        tokenizer = given if given is not None else saved_tokenizer(folder)
        say(f"going on with an interrupted build: {_megabytes(marks.mark.size, found)} are whole")
    encoder = tokenizers.Encoder(tokenizer)
    with ExitStack() as stack:
        writers = {
            stream: stack.enter_context(shards.ShardWriter(folder, *stream, encoder.dtype))
            for stream in shards.streams(len(sources))
        }
        files = [file for writer in writers.values() for file in writer.files]
        pieces = _pieces(sources, found, marks.mark, say)
        for batch, encoded in _encoded(encoder, _batches(pieces)):
            for piece, ids in zip(batch, encoded, strict=True):
                writer = writers[piece.source, piece.split]
                if piece.opens:
                    writer.start()
                    if encoder.begin is not None:
                        writer.write([encoder.begin])
                writer.write(ids)
                if piece.closes and encoder.end is not None:
                    writer.write([encoder.end])
                if piece.mark is not None:
                    marks.add(piece.mark, files)
        counts = [
            {
                split: {
                    "documents": writers[number, split].documents,
                    "tokens": writers[number, split].tokens,
                }
                for split in SPLITS
            }
            for number in range(len(sources))
        ]
    shards.seal(folder, {"content": content, "dtype": encoder.dtype.str, "streams": counts})


def _encoded(
    encoder: tokenizers.Encoder, batches: Iterator["list[_Piece]"]
) -> Iterator[tuple["list[_Piece]", list[np.ndarray]]]:
    """Yield batches in order with their ids, two being encoded while one is read or written.

    The tokenizer uses all cores by itself. So that they do not wait for Python, which reads the
    text, hashes it and stores ids, the next batch is always at hand.
    """
    waiting: deque[tuple[list[_Piece], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(_ENCODERS) as pool:
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(encoder.encode, [p.text for p in batch])))
                if len(waiting) > _ENCODERS:
                    done, ids = waiting.popleft()
                    yield done, ids.result()
            for done, ids in waiting:
                yield done, ids.result()
        finally:
            for _, ids in waiting:
                ids.cancel()


class _Piece(NamedTuple):
    """A part of a document; nearly always the whole of it."""

    text: str
    source: int
    split: str
    opens: bool
    closes: bool
    mark: journal.Mark | None
    """The place after it, where the journal is to have one."""


def _pieces(
    sources: tuple[Source, ...], found: CorpusScan, begun: journal.Mark | None, say: Progress
) -> Iterator[_Piece]:
    """Yield the text after the mark up to which it is tokenised; what is before is only compared.

    Raises:
        ChangedError: a text is not what was scanned, or what was tokenised up to the mark.
    """
    done = marked = 0
    said = 10 * begun.size // found.size if begun is not None else 0
    for number, (source, known) in enumerate(zip(sources, found.sources, strict=True)):
        if begun is not None and number < begun.source:
            done += known.size  # compared by the build that was interrupted
            continue
        digest = hashlib.sha256()
        before = begun if begun is not None and number == begun.source else None
        for count, document in enumerate(source.documents(Counter()), start=1):
            digest.update(document.digest)
            done += document.size
            if before is not None:
                marked = done
                if count == before.documents:
                    if digest.hexdigest() != before.digest:
                        break
                    before = None
                continue
            mark = None
            if done - marked >= _MARK_BYTES:
                mark = journal.Mark(number, count, digest.hexdigest(), done)
                marked = done
            split = "validation" if found.held_out(document) else "train"
            parts = list(tokenizers.cut(document.text, _PIECE_CHARACTERS))
            for place, part in enumerate(parts, start=1):
                last = place == len(parts)
                yield _Piece(part, number, split, place == 1, last, mark if last else None)
            if (tenth := 10 * done // found.size) > said:
                said = tenth
                say(f"tokenising: {_megabytes(done, found)}")
        if before is not None or digest.hexdigest() != known.digest:
            raise ChangedError(f"data {source.spec!r} changed while it was read; run again")


def _megabytes(size: int, found: CorpusScan) -> str:
    return f"{size / 1e6:.1f} of {found.size / 1e6:.1f} MB"


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Group pieces so that no group is above `_BATCH_CHARACTERS`."""
    batch: list[_Piece] = []
    length = 0
    for piece in pieces:
        if batch and length + len(piece.text) > _BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
        batch.append(piece)
        length += len(piece.text)
    if batch:
        yield batch


def saved_tokenizer(folder: Path) -> Any:
    """The tokenizer of a build."""
    from clearhead.models.loading import load_tokenizer

    return load_tokenizer(folder / "tokenizer")
