"""Tokenisation of a corpus: a file of ids and one of document offsets for each source and split."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.data import tokenizer as tokenizers
from clearhead.data.corpus import SPLITS, STARTS
from clearhead.data.scan import CorpusScan, sample
from clearhead.data.sources import Source
from clearhead.errors import ClearheadError

# Text that is in the tokenizer at once: an id costs it about 100 bytes of bookkeeping, so these
# keep a build at a few hundred MB however large the corpus or a document.
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 20

Progress = Callable[[str], None]


class ChangedError(ClearheadError):
    """Text that changed after it was scanned, or after a run began."""


class _Piece(NamedTuple):
    """A part of a document; nearly always the whole of it."""

    text: str
    source: int
    split: str
    opens: bool
    closes: bool


class _Shard:
    """The files of one source and split, and their tokens and documents so far."""

    def __init__(self, folder: Path, source: int, split: str, files: ExitStack) -> None:
        path = folder / f"{source}.{split}.tokens"
        self._ids, self._starts = (
            files.enter_context(open(one, "wb"))  # noqa: SIM115
            for one in (path, path.with_suffix(".starts"))
        )
        self.tokens = self.documents = 0

    def start(self) -> None:
        """The next token is the first of a document."""
        self._starts.write(np.asarray([self.tokens], dtype=STARTS).tobytes())
        self.documents += 1

    def write(self, ids: np.ndarray) -> None:
        self._ids.write(ids.tobytes())
        self.tokens += len(ids)


def build(
    folder: Path,
    given: Any,
    vocabulary: int,
    sources: tuple[Source, ...],
    scanned: CorpusScan,
    say: Progress,
) -> dict[str, Any]:
    """Tokenise everything into `folder`, the tokenizer beside it.

    Args:
        given: a tokenizer; None trains one of `vocabulary` entries.

    Returns:
        The "dtype" of ids, and in "streams" of each source and split the documents and tokens.

    Raises:
        ChangedError: a text is not what was scanned.
    """
    tokenizer = given
    if tokenizer is None:
        say(f"training a byte-level BPE of {vocabulary:,} entries")
        tokenizer = tokenizers.train(sample(sources, scanned), vocabulary)
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder = tokenizers.Encoder(tokenizer)
    begin, end = (
        np.asarray([] if one is None else [one], dtype=encoder.dtype)
        for one in (encoder.begin, encoder.end)
    )
    with ExitStack() as files:
        shards = [
            {split: _Shard(folder, number, split, files) for split in SPLITS}
            for number in range(len(sources))
        ]
        for piece, ids in _encoded(encoder, _batches(_pieces(sources, scanned, say))):
            shard = shards[piece.source][piece.split]
            if piece.opens:
                shard.start()
                shard.write(begin)
            shard.write(ids)
            if piece.closes:
                shard.write(end)
    counts = [
        {split: {"documents": one.documents, "tokens": one.tokens} for split, one in source.items()}
        for source in shards
    ]
    return {"dtype": encoder.dtype.str, "streams": counts}


def _encoded(
    encoder: tokenizers.Encoder, batches: Iterator[list[_Piece]]
) -> Iterator[tuple[_Piece, np.ndarray]]:
    """Yield pieces in order with their ids; a batch is encoded while the next one is read."""
    with ThreadPoolExecutor(1) as pool:
        before, ids = list[_Piece](), pool.submit(encoder.encode, [])
        for batch in batches:
            coming = pool.submit(encoder.encode, [piece.text for piece in batch])
            yield from zip(before, ids.result(), strict=True)
            before, ids = batch, coming
        yield from zip(before, ids.result(), strict=True)


def _pieces(sources: tuple[Source, ...], scanned: CorpusScan, say: Progress) -> Iterator[_Piece]:
    """Yield the text of all sources, and compare it with what was scanned."""
    done = said = 0
    for number, (source, known) in enumerate(zip(sources, scanned.sources, strict=True)):
        digest = hashlib.sha256()
        for document in source.documents(Counter()):
            digest.update(document.digest)
            done += document.size
            split = "validation" if scanned.held_out(document) else "train"
            parts = list(tokenizers.cut(document.text, _PIECE_CHARACTERS))
            for place, part in enumerate(parts, start=1):
                yield _Piece(part, number, split, place == 1, place == len(parts))
            if (tenth := 10 * done // scanned.size) > said:
                said = tenth
                say(f"tokenising: {done / 1e6:.1f} of {scanned.size / 1e6:.1f} MB")
        if digest.hexdigest() != known.digest:
            raise ChangedError(f"data {source.spec!r} changed while it was read; run again")


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
