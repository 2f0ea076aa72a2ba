"""From a config to a corpus: scan the text, then reuse the tokens of before or make them."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.data import journal, shards
from clearhead.data import tokenizer as tokenizers
from clearhead.data.batches import is_order_of
from clearhead.data.config import DataConfig
from clearhead.data.corpus import SPLITS, Corpus, fingerprint_of
from clearhead.data.scan import CorpusScan, forget, sample, scan
from clearhead.data.sources import Source, find
from clearhead.errors import ClearheadError

# Raise it when the same text would give other tokens or other files than before.
_FORMAT = 1
# Text that is in the tokenizer at once: an id costs it about 100 bytes of bookkeeping, so these
# keep a build at a few hundred MB however large the corpus or a document.
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 20
# Text after which the journal gets a mark: about what an interruption costs.
_MARK_BYTES = 64 << 20
_ENCODERS = 2  # threads that call the tokenizer, which has threads of its own
_TRAINED = "byte-level BPE trained on the training documents"

Progress = Callable[[str], None]


class ChangedError(ClearheadError):
    """Text that is not what the scan read."""


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
    hashed once, and again when a file's size, times or inode changed. A build that was
    interrupted, by whatever, is gone on with by the next call; one that was damaged since is made
    anew. Of processes that need the same corpus at once, one makes it and the others wait. Memory
    stays at a few hundred MB.

    Args:
        config: which text, and how it becomes tokens.
        tokenizer: one that is loaded, instead of the one that `config` names.
        progress: gets a line of text now and then.
        closed: whether a tokenizer without an end token is refused; else documents have no END.
        began: the fingerprint of the batches of a run that is to go on.

    Raises:
        ClearheadError: for every way in which the text, the tokenizer or the cache is unfit; for a
            text that is not the one with which a run `began`, before it is tokenised.
    """
    say = progress or _silent
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = tokenizers.load(config.tokenizer)
    if tokenizer is None:
        identity = tokenizers.trained_identity(config.vocabulary)
    else:
        identity = tokenizers.loaded_identity(tokenizers.checked(tokenizer, closed=closed))
    sources = find(config, say)
    found = scan(sources, config.validation, config.cache_folder, say)
    content = _content(found, identity)
    weights = [source.weight for source in sources]
    if began is not None and not is_order_of(began, fingerprint_of(content, weights)):
        names = ", ".join(source.spec for source in sources)
        raise ClearheadError(
            f"data {names}: the text or the tokenizer changed since the run began: put back what "
            "it was, or start another run, for which tokens are made of what it is now"
        )
    target = config.cache_folder / "corpora" / content[:32]
    while True:
        try:
            corpus = _open(target, content, config, tokenizer, sources, found)
            say(f"reusing the tokens in {target}")
            return corpus
        except FileNotFoundError:
            pass
        except shards.DamagedError as error:
            say(f"the tokens in {target} are damaged ({error}); making them anew")
        with shards.going_on(target, say) as folder:
            if folder is None:
                continue
            try:
                _build(folder, content, tokenizer, config.vocabulary, sources, found, say)
            except ChangedError:
                forget(sources, config.cache_folder)
                journal.forget(folder)
                raise
            # Opened before it is published: what is mapped stays, whatever happens to the name.
            corpus = _open(folder, content, config, tokenizer, sources, found)
            journal.forget(folder)
            shards.publish(folder, target)
            return corpus


def _silent(line: str) -> None:
    """Nobody listens."""


def _content(found: CorpusScan, identity: str) -> str:
    """The hash by which a build is reused: of all that determines its tokens."""
    parts = [_FORMAT, identity, found.threshold, [source.digest for source in found.sources]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _train(sources: tuple[Source, ...], found: CorpusScan, vocabulary: int, say: Progress) -> Any:
    say(f"training a byte-level BPE of {vocabulary:,} entries")
    return tokenizers.train(sample(sources, found), vocabulary)


def _build(
    folder: Path,
    content: str,
    given: Any,
    vocabulary: int,
    sources: tuple[Source, ...],
    found: CorpusScan,
    say: Progress,
) -> None:
    """Tokenise everything into `folder`, or what an interrupted build left to do, and seal it."""
    names, place = shards.names(len(sources)), folder / "tokenizer"
    marks = journal.Journal(folder, names, shards.digest_of_folder(place))
    if marks.mark is None:
        tokenizer = given if given is not None else _train(sources, found, vocabulary, say)
        tokenizer.save_pretrained(place)
        marks = journal.Journal(folder, names, shards.digest_of_folder(place))
    else:
        tokenizer = given if given is not None else _saved(folder)
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


def _open(
    folder: Path,
    content: str,
    config: DataConfig,
    given: Any,
    sources: tuple[Source, ...],
    found: CorpusScan,
) -> Corpus:
    """Check a build and map it.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not what was published.
    """
    index = shards.check(folder, config.cache_folder / "checked" / f"{content[:32]}.json")
    if index.get("content") != content:
        raise shards.DamagedError("it is of another content")
    # A tokenizer that was given is not read again: a copy of one with code would need it.
    tokenizer = _saved(folder) if given is None else given
    name = _TRAINED if given is None else given.name_or_path
    streams = {
        split: tuple(
            shards.map_stream(
                folder,
                number,
                split,
                np.dtype(index["dtype"]),
                spec=source.spec,
                weight=source.weight,
            )
            for number, source in enumerate(sources)
        )
        for split in SPLITS
    }
    size = tokenizers.vocabulary_size(tokenizer)
    return Corpus(
        tokenizer=tokenizer,
        vocabulary_size=size,
        content=content,
        streams=streams,
        description={
            "sources": [
                {
                    "spec": source.spec,
                    "weight": source.weight,
                    "documents": known.documents,
                    "bytes": known.size,
                    "skipped": known.skipped,
                    **({"revision": source.revision} if source.revision is not None else {}),
                    **counts,
                }
                for source, known, counts in zip(
                    sources, found.sources, index["streams"], strict=True
                )
            ],
            "documents": sum(known.documents for known in found.sources),
            "bytes": found.size,
            "tokens": {split: sum(map(len, streams[split])) for split in SPLITS},
            "validation": config.validation,
            "limit": config.limit,
            "text_field": config.text_field,
            "tokenizer": {
                "name": name,
                "vocabulary": size,
                "begin": tokenizer.bos_token,
                "end": tokenizer.eos_token,
            },
            "packing": _packing(sources, tokenizer),
        },
    )


def _saved(folder: Path) -> Any:
    """The tokenizer of a build."""
    from clearhead.models.loading import load_tokenizer

    return load_tokenizer(folder / "tokenizer")


def _packing(sources: tuple[Source, ...], tokenizer: Any) -> str:
    """Packing of documents into one stream, in words for a report."""
    marks = {"begin": tokenizer.bos_token_id, "end": tokenizer.eos_token_id}
    begin, end = (one is not None for one in marks.values())
    rule = f"each document is {'BEGIN + ' * begin}tokens{' + END' * end}, end to end"
    if missing := [f"no {name} token" for name, one in marks.items() if one is None]:
        rule += f" (the tokenizer has {' and '.join(missing)})"
    if cut := [source.spec for source in sources if source.in_pieces]:
        rule += f"; cut at line ends into pieces that count as documents: {', '.join(cut)}"
    return rule
