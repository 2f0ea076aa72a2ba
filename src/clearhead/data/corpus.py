"""Corpora: memory-mapped token streams, one for each source and split, made once and reused."""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout

from clearhead.data import sources
from clearhead.data import tokenizer as tokenizers
from clearhead.data.sources import SourceScan, remembered
from clearhead.errors import ClearheadError, choose
from clearhead.records import manifest
from clearhead.records.files import publish_folder, writing
from clearhead.records.identity import digest_of
from clearhead.settings.data import DataConfig

SPLITS = ("train", "validation")
STARTS = "<i8"  # offsets of documents
_TUNING, _TUNING_SHARE = "tuning", 0.1
_FORMAT = 1  # to be raised when the same text would give other tokens
_INDEX = "corpus.json"
_ADVICE = "make room, or name another folder (cache, or $CLEARHEAD_CACHE)"
# Text in the tokenizer at once; it keeps about 100 bytes for each id.
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The documents of one source and split, end to end.

    Attributes:
        spec: the source, as the user named it.
        weight: its weight; None where no source has one.
        tokens: ids, 1-D, uint16 or uint32, memory-mapped and read-only.
        starts: offset of each document's first token, 1-D int64, memory-mapped.
        file: the open file of `tokens`; None for tokens in memory.
    """

    spec: str
    weight: float | None
    tokens: np.ndarray
    starts: np.ndarray
    file: FileIO | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from `start` on, int64, read from the file: a mapping's pages count as
        this process's memory, and random reads would load 32 times the bytes wanted. A
        ClearheadError if the file was cut short."""
        if self.file is None:
            return self.tokens[start : start + length].astype(np.int64)
        size = self.tokens.itemsize
        data = os.pread(self.file.fileno(), length * size, start * size)
        if len(data) < length * size:
            raise ClearheadError(
                f"the tokens of data {self.spec!r} were cut short while they were in use: start "
                "again, and they are made anew"
            )
        return np.frombuffer(data, self.tokens.dtype).astype(np.int64)

    def openings(self, start: int, length: int) -> np.ndarray:
        """True at the first token of each document in a window, bool [length]."""
        low, high = np.searchsorted(self.starts, [start, start + length])
        opens_T = np.zeros(length, dtype=bool)
        opens_T[self.starts[low:high] - start] = True
        return opens_T


def map_stream(place: Path, dtype: str, spec: str, weight: float | None) -> TokenStream:
    """Open PLACE.tokens and PLACE.starts, the ids and document offsets of a source, read-only."""
    path = place.with_name(f"{place.name}.tokens")
    tokens, starts = (
        # The operating system maps no empty file.
        np.memmap(one, kind, mode="r") if one.stat().st_size else np.empty(0, kind)
        for one, kind in ((path, dtype), (path.with_suffix(".starts"), STARTS))
    )
    return TokenStream(spec=spec, weight=weight, tokens=tokens, starts=starts, file=FileIO(path))


@dataclass(frozen=True, kw_only=True, eq=False)  # one is equal to itself alone
class Corpus:
    """Tokenised text with its tokenizer; `clearhead.data.prepare` makes it.

    Attributes:
        tokenizer: a `transformers.PreTrainedTokenizerFast`; it adds no BEGIN or END by itself.
        vocabulary_size: the number of ids a model needs, one more than the largest.
        fingerprint: hex hash of every text, the tokenizer, the split and the sources' weights.
        streams: of "train" and "validation", one a source, maybe empty.
        description: sources, documents and tokens by split, for JSON.
    """

    tokenizer: Any
    vocabulary_size: int
    fingerprint: str
    streams: dict[str, tuple[TokenStream, ...]]
    description: dict[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> tuple[TokenStream, ...]:
        """The streams of "train" or "validation"; a ClearheadError for another name."""
        return self.streams[choose("split", name, SPLITS)]

    def for_tuning(self) -> "Corpus":
        """A corpus for choosing settings, on text that no result reports: the last tenth of each
        source's training text (from a document's start, if one is there) is held out."""
        parts = []
        for stream in self.streams["train"]:
            cut = round((1 - _TUNING_SHARE) * len(stream))
            place = int(np.searchsorted(stream.starts, cut))
            if place < len(stream.starts):
                cut = int(stream.starts[place])
            tokens, starts = stream.tokens, stream.starts
            first = replace(stream, tokens=tokens[:cut], starts=starts[:place])
            rest = replace(stream, tokens=tokens[cut:], starts=starts[place:] - cut, file=None)
            parts.append((first, rest))
        train, held_out = zip(*parts, strict=True)
        return replace(
            self,
            streams={"train": train, "validation": held_out},
            fingerprint=digest_of([self.fingerprint, _TUNING]),
        )

    def describe(self) -> dict[str, Any]:
        """Description of the corpus for JSON: sources, documents and tokens by split, hashes."""
        return self.description | {"fingerprint": self.fingerprint}


class _Piece(NamedTuple):
    """A part of a document, nearly always the whole of it, for a split of a source."""

    text: str
    source: int
    split: str
    opens: bool
    closes: bool


def prepare(
    config: DataConfig,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    closed: bool = True,
    began: str | None = None,
) -> Corpus:
    """Return the tokens of a corpus, made now or reused.

    Reuse is by content: the hash of every text, the tokenizer and the split. Text and tokens are
    hashed again when a file's size, times or inode changed, and damaged tokens made again. Of
    processes that need one corpus, one makes it and the others wait, in a few hundred MB of memory.

    Args:
        config: the text, and its conversion to tokens.
        tokenizer: a loaded one, for a config that names none.
        progress: called with a line of text now and then.
        closed: whether a tokenizer without an end token is refused; else documents have no END.
        began: the batch fingerprint in the record of a run to resume; other text is refused.

    Raises:
        ClearheadError: for text, a tokenizer or a cache that cannot be used.
    """
    from clearhead.models.loading import explained, load_tokenizer

    say = progress or (lambda line: None)
    for name in () if tokenizer is None else ("tokenizer", "vocabulary"):
        if getattr(config, name) != getattr(DataConfig, name):
            raise ClearheadError(f"data.{name} has no effect: the model has its own tokenizer")
    if tokenizer is None and (path := config.tokenizer) is not None:
        with explained(path, "tokenizer", allow="choose one of transformers' own classes"):
            tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        name, fast = tokenizer.name_or_path, getattr(tokenizer, "backend_tokenizer", None)
        if fast is None or (closed and tokenizer.eos_token_id is None):
            lack = "fast form" if fast is None else "end token (eos_token), to close every document"
            raise ClearheadError(f"tokenizer {name!r} has no {lack}; choose one that has it")
    texts = sources.find(config, say)
    scans = [sources.scan(source, config.cache_folder, say) for source in texts]
    cutoff = sources.threshold(scans, config.validation)
    # A build's tokens are determined by these.
    identity = tokenizers.identity(tokenizer, config.vocabulary)
    content = digest_of([_FORMAT, identity, cutoff, [one.digest for one in scans]])
    # Weights change which tokens are read, hence the run, but not the tokens.
    fingerprint = digest_of([content, [one.source.weight for one in scans]])
    orders = [fingerprint, digest_of([fingerprint, _TUNING])]
    orders += [digest_of([order, "feistel"]) for order in orders]  # of large corpora
    if began is not None and began.partition(",")[0] not in orders:
        names = ", ".join(one.source.spec for one in scans)
        raise ClearheadError(
            f"data {names}: the text or the tokenizer changed since the run began: put back what "
            "it was, or start another run, for which tokens are made of what it is now"
        )
    target = config.cache_folder / "corpora" / content[:32]
    index = _verified(target, lambda line: None)
    with _lock(target, say) if index is None else nullcontext():
        if index is not None or (index := _verified(target, say)) is not None:
            say(f"reusing the tokens in {target}")
        else:
            shutil.rmtree(target, ignore_errors=True)
            with publish_folder(target, _ADVICE) as folder:
                made = tokenizer
                if made is None:
                    say(f"training a byte-level BPE of {config.vocabulary:,} entries")
                    made = tokenizers.train(sources.sample(scans, cutoff), config.vocabulary)
                index = _tokenise(folder, made, scans, cutoff, say)
                manifest.seal(folder, index, name=_INDEX)
        streams = {
            split: tuple(
                map_stream(target / f"{n}.{split}", index["dtype"], source.spec, source.weight)
                for n, source in enumerate(one.source for one in scans)
            )
            for split in SPLITS
        }
        # A given tokenizer is not read back: one with code of its own would need that code.
        if tokenizer is None:
            name = "byte-level BPE trained on the training documents"
            tokenizer = load_tokenizer(target / "tokenizer")
    size = tokenizers.vocabulary_size(tokenizer)
    described = []
    for one, counts in zip(scans, index["streams"], strict=True):
        facts: dict[str, Any] = {"spec": one.source.spec, "weight": one.source.weight}
        facts |= {"documents": one.documents, "bytes": one.size, "skipped": one.skipped}
        if one.source.revision:
            facts["revision"] = one.source.revision
        described.append(facts | counts)
    ends = {"begin": tokenizer.bos_token, "end": tokenizer.eos_token}
    description = {
        "sources": described,
        "documents": sum(one.documents for one in scans),
        "bytes": sum(one.size for one in scans),
        "tokens": {split: sum(map(len, streams[split])) for split in SPLITS},
        **{key: getattr(config, key) for key in ("validation", "limit", "text_field")},
        "tokenizer": {"name": name, "vocabulary": size, **ends},
    }
    return Corpus(
        tokenizer=tokenizer,
        vocabulary_size=size,
        fingerprint=fingerprint,
        streams=streams,
        description=description,
    )


def _verified(target: Path, say: Progress) -> dict[str, Any] | None:
    """The manifest of a build; None where there is no build, or its files have changed."""
    if not target.is_dir():
        return None
    files = sorted(path for path in target.rglob("*") if path.is_file())
    checked = target.parent.with_name("checked") / f"{target.name}.json"
    verify = partial(manifest.verify, target, name=_INDEX, advice="its tokens are made anew")
    try:
        return remembered(checked, files, [path.name for path in files], verify)[0]
    except ClearheadError as error:
        say(str(error))
        return None


def _lock(target: Path, say: Progress) -> AcquireReturnProxy:
    """Keep other processes from making the same tokens, until the lock is left."""
    place = target.parent.with_name("locks") / target.name
    with writing(target, _ADVICE):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place)
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            say("waiting for another process, which makes the same tokens")
            return lock.acquire()


def _tokenise(
    folder: Path, tokenizer: Any, scans: list[SourceScan], cutoff: int, say: Progress
) -> dict[str, Any]:
    """Write all tokens into `folder`, and beside them the tokenizer; return the "dtype" of ids, and
    "streams": documents and tokens of each source and split."""
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder = tokenizers.Encoder(tokenizer)
    begin, end = ([] if one is None else [one] for one in (encoder.begin, encoder.end))
    counts = [{split: {"documents": 0, "tokens": 0} for split in SPLITS} for _ in scans]
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / name).open("wb"))
            for number in range(len(scans))
            for split in SPLITS
            for name in (f"{number}.{split}.tokens", f"{number}.{split}.starts")
        }
        for piece, ids in _encoded(encoder, _pieces(scans, cutoff, say)):
            count, name = counts[piece.source][piece.split], f"{piece.source}.{piece.split}"
            if piece.opens:
                files[f"{name}.starts"].write(np.asarray(count["tokens"], STARTS).tobytes())
                count["documents"] += 1
            parts = (begin * piece.opens, ids, end * piece.closes)
            tokens = np.concatenate([np.asarray(part, encoder.dtype) for part in parts])
            files[f"{name}.tokens"].write(tokens.tobytes())
            count["tokens"] += len(tokens)
    return {"dtype": encoder.dtype.str, "streams": counts}


def _pieces(scans: list[SourceScan], cutoff: int, say: Progress) -> Iterator[_Piece]:
    """Documents of all sources, checked against the scans."""
    size, done, tenths = sum(one.size for one in scans), 0, 0
    for number, known in enumerate(scans):
        digest = hashlib.sha256()
        for document in known.source.documents(Counter()):
            digest.update(document.digest)
            split = "validation" if document.key < cutoff else "train"
            parts = list(tokenizers.cut(document.text, _PIECE_CHARACTERS))
            for place, part in enumerate(parts, start=1):
                yield _Piece(part, number, split, place == 1, place == len(parts))
            done += document.size
            if 10 * done // size > tenths:
                tenths = 10 * done // size
                say(f"tokenising: {done / 1e6:.1f} of {size / 1e6:.1f} MB")
        if digest.hexdigest() != known.digest:
            for cache_file in (one.cache_file for one in scans if one.cache_file is not None):
                cache_file.unlink(missing_ok=True)
            raise ClearheadError(f"data {known.source.spec!r} changed while it was read; run again")


def _encoded(
    encoder: tokenizers.Encoder, pieces: Iterator[_Piece]
) -> Iterator[tuple[_Piece, np.ndarray]]:
    """Yield pieces in order with their ids; some are encoded while the next ones are read."""

    def encode(batch: list[_Piece]) -> Iterator[tuple[_Piece, np.ndarray]]:
        return zip(batch, encoder.encode([piece.text for piece in batch]), strict=True)

    with ThreadPoolExecutor(1) as pool:
        batch, length, coming = list[_Piece](), 0, pool.submit(encode, [])
        for piece in pieces:
            if batch and length + len(piece.text) > _BATCH_CHARACTERS:
                before, coming = coming, pool.submit(encode, batch)
                yield from before.result()
                batch, length = [], 0
            batch.append(piece)
            length += len(piece.text)
        yield from coming.result()
        yield from encode(batch)
