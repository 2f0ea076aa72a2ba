"""From a config to a corpus: scan the text, then reuse the tokens of before or make them."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from clearhead.data import tokenizer as tokenizers
from clearhead.data.config import DataConfig
from clearhead.data.corpus import SPLITS, Corpus, fingerprint_of, is_order_of, map_stream
from clearhead.data.scan import CorpusScan, scan
from clearhead.data.sources import Source, find
from clearhead.data.tokenisation import ChangedError, Progress, build
from clearhead.errors import ClearheadError
from clearhead.records import manifest
from clearhead.records.files import publish_folder, read_json, sha256_of, writing

# Raise it when the same text would give other tokens than before.
_FORMAT = 1
_INDEX = "corpus.json"
_TRAINED = "byte-level BPE trained on the training documents"
_ADVICE = "make room, or name another folder (cache, or $CLEARHEAD_CACHE)"


def prepare(
    config: DataConfig,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    closed: bool = True,
    began: str | None = None,
) -> Corpus:
    """Return the tokens of a corpus, made now or reused.

    Reuse is by content: the hash of every text, the tokenizer and the split. Text is hashed once,
    and again when a file's size, times or inode changed. Tokens get their name by one rename when
    all are written; those of a process that was killed are made anew, and so are files of other
    sizes than were written. Of processes that need the same corpus at once, one makes it and the
    others wait. Memory stays at a few hundred MB.

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
    say = progress or (lambda line: None)
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = tokenizers.load(config.tokenizer)
    if tokenizer is None:
        identity = tokenizers.trained_identity(config.vocabulary)
    else:
        identity = tokenizers.loaded_identity(tokenizers.checked(tokenizer, closed=closed))
    sources = find(config, say)
    scanned = scan(sources, config.validation, config.cache_folder, say)
    # Of all that determines the tokens of a build.
    digests = [source.digest for source in scanned.sources]
    content = fingerprint_of(_FORMAT, identity, scanned.threshold, digests)
    weights = [source.weight for source in sources]
    if began is not None and not is_order_of(began, fingerprint_of(content, weights)):
        names = ", ".join(source.spec for source in sources)
        raise ChangedError(
            f"data {names}: the text or the tokenizer changed since the run began: put back what "
            "it was, or start another run, for which tokens are made of what it is now"
        )
    target = config.cache_folder / "corpora" / content[:32]
    index = _built(target)
    with nullcontext() if index else _lock(target, say):
        if index := index or _built(target):
            say(f"reusing the tokens in {target}")
        else:
            shutil.rmtree(target, ignore_errors=True)
            with publish_folder(target, _ADVICE) as folder:
                index = build(folder, tokenizer, config.vocabulary, sources, scanned, say)
                manifest.seal(folder, index, name=_INDEX)
    return _opened(target, index, content, config, tokenizer, sources, scanned)


def _built(target: Path) -> dict[str, Any] | None:
    """The index of a build; None where there is none, or it is damaged: tokens of another size, or
    a tokenizer of other content."""
    try:
        index = read_json(target / _INDEX, "its tokens are made anew")
        width = np.dtype(index["dtype"]).itemsize
        for number, source in enumerate(index["streams"]):
            for split, counts in source.items():
                path = target / f"{number}.{split}.tokens"
                sizes = [path.stat().st_size, path.with_suffix(".starts").stat().st_size]
                if sizes != [counts["tokens"] * width, counts["documents"] * 8]:
                    return None
        small = {file: sha for file, sha in index["files"].items() if "tokenizer/" in file}
        intact = all(sha256_of(target / file) == sha for file, sha in small.items())
    except (ClearheadError, OSError, KeyError, TypeError):
        return None
    return index if intact else None


def _lock(target: Path, say: Progress) -> FileLock:
    """A lock that keeps other processes from making the same tokens, held."""
    place = target.parent.with_name("locks") / target.name
    with writing(target, _ADVICE):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("waiting for another process, which makes the same tokens")
            lock.acquire()
    return lock


def _opened(
    folder: Path,
    index: dict[str, Any],
    content: str,
    config: DataConfig,
    given: Any,
    sources: tuple[Source, ...],
    scanned: CorpusScan,
) -> Corpus:
    """The corpus of a build."""
    from clearhead.models.loading import load_tokenizer

    # A tokenizer that was given is not read again: a copy of one with code would need it.
    tokenizer = load_tokenizer(folder / "tokenizer") if given is None else given
    name = _TRAINED if given is None else given.name_or_path
    streams = {
        split: tuple(
            map_stream(
                folder, number, split, index["dtype"], spec=source.spec, weight=source.weight
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
                    sources, scanned.sources, index["streams"], strict=True
                )
            ],
            "documents": sum(known.documents for known in scanned.sources),
            "bytes": scanned.size,
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
        },
    )
