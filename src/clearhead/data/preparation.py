"""From a config to a corpus: scan the text, then reuse cached tokens or make them.

Tokens are stored as a file of ids and one of document offsets for each source and split.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout

from clearhead.data import tokenizer as tokenizers
from clearhead.data.config import DataConfig
from clearhead.data.corpus import SPLITS, STARTS, Corpus, is_order_of, map_stream
from clearhead.data.scan import SourceScan, remembered, sample, scan, survey, threshold
from clearhead.data.sources import find
from clearhead.errors import ClearheadError
from clearhead.records import manifest
from clearhead.records.files import publish_folder, writing
from clearhead.records.identity import digest_of

# Raise it when the same text would give other tokens than before.
_FORMAT = 1
_INDEX = "corpus.json"
_ADVICE = "make room, or name another folder (cache, or $CLEARHEAD_CACHE)"
# Text that is in the tokenizer at once: an id costs it about 100 bytes of bookkeeping, so these
# keep a build at a few hundred MB however large the corpus or a document.
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 20

Progress = Callable[[str], None]


class _Piece(NamedTuple):
    """A part of a document, nearly always the whole of it, and the shard of its tokens."""

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
    hashed once, and again when a file's size, times or inode changed. Incomplete or damaged tokens
    are made again. Of processes that need the same corpus at once, one makes it and the others
    wait. Memory stays at a few hundred MB.

    Args:
        config: the text, and its conversion to tokens.
        tokenizer: a loaded one, used instead of the one that `config` names.
        progress: called with a line of text now and then.
        closed: whether a tokenizer without an end token is refused; else documents have no END.
        began: the batch fingerprint in the record of a run to resume.

    Raises:
        ClearheadError: for text, a tokenizer or a cache that cannot be used; before tokenising, for
            text other than that of the run to resume.
    """
    say = progress or (lambda line: None)
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = tokenizers.load(config.tokenizer)
    if tokenizer is not None:
        tokenizers.check(tokenizer, closed=closed)
    scans = [scan(source, config.cache_folder, say) for source in find(config, say)]
    cutoff = threshold(scans, config.validation)
    # Of all that determines the tokens of a build.
    identity = tokenizers.identity(tokenizer, config.vocabulary)
    content = digest_of([_FORMAT, identity, cutoff, [one.digest for one in scans]])
    # Weights choose what is read of the tokens: another run, but no other tokens.
    fingerprint = digest_of([content, [one.source.weight for one in scans]])
    if began is not None and not is_order_of(began, fingerprint):
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
                index = _tokenise(folder, config, tokenizer, scans, cutoff, say)
                manifest.seal(folder, index, name=_INDEX)
        return _opened(target, config, tokenizer, scans, index, fingerprint)


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
    folder: Path,
    config: DataConfig,
    tokenizer: Any,
    scans: list[SourceScan],
    cutoff: int,
    say: Progress,
) -> dict[str, Any]:
    """Write all tokens into `folder`, and beside them the tokenizer, trained where it is None.

    Returns:
        "dtype" of the ids; "streams": documents and tokens of each source and split.
    """
    if tokenizer is None:
        say(f"training a byte-level BPE of {config.vocabulary:,} entries")
        tokenizer = tokenizers.train(sample(scans, cutoff), config.vocabulary)
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
        for piece, ids in _encoded(encoder, _pieces(config, scans, cutoff, say)):
            count, name = counts[piece.source][piece.split], f"{piece.source}.{piece.split}"
            if piece.opens:
                files[f"{name}.starts"].write(np.asarray(count["tokens"], STARTS).tobytes())
                count["documents"] += 1
            parts = (begin * piece.opens, ids, end * piece.closes)
            tokens = np.concatenate([np.asarray(part, encoder.dtype) for part in parts])
            files[f"{name}.tokens"].write(tokens.tobytes())
            count["tokens"] += len(tokens)
    return {"dtype": encoder.dtype.str, "streams": counts}


def _pieces(
    config: DataConfig, scans: list[SourceScan], cutoff: int, say: Progress
) -> Iterator[_Piece]:
    """The text of all sources, compared with the scans."""
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
            for one in scans:
                survey(one.source, config.cache_folder).unlink(missing_ok=True)
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


def _opened(
    folder: Path,
    config: DataConfig,
    tokenizer: Any,
    scans: list[SourceScan],
    index: dict[str, Any],
    fingerprint: str,
) -> Corpus:
    """Map the streams that `_tokenise` wrote into `folder`; `index` is what it returned."""
    from clearhead.models.loading import load_tokenizer

    # A tokenizer that was given is not read again: a copy of one with code would need it.
    name = "byte-level BPE trained on the training documents"
    if tokenizer is None:
        tokenizer = load_tokenizer(folder / "tokenizer")
    else:
        name = tokenizer.name_or_path
    streams = {
        split: tuple(
            map_stream(folder / f"{n}.{split}", index["dtype"], one.source.spec, one.source.weight)
            for n, one in enumerate(scans)
        )
        for split in SPLITS
    }
    size = tokenizers.vocabulary_size(tokenizer)
    sources = []
    for one, counts in zip(scans, index["streams"], strict=True):
        described = {"spec": one.source.spec, "weight": one.source.weight}
        described |= {"documents": one.documents, "bytes": one.size, "skipped": one.skipped}
        if one.source.revision:
            described["revision"] = one.source.revision
        sources.append(described | counts)
    ends = {"begin": tokenizer.bos_token, "end": tokenizer.eos_token}
    description = {
        "sources": sources,
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
