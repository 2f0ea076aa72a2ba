"""From a config to a corpus: scan the text, then reuse the tokens of before or make them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clearhead.data import tokenizer as tokenizers
from clearhead.data.config import DataConfig
from clearhead.data.corpus import SPLITS, Corpus, fingerprint_of, is_order_of, map_stream
from clearhead.data.scan import CorpusScan, scan, survey
from clearhead.data.sources import Source, find
from clearhead.data.stat_cache import keep, recall, state_of
from clearhead.data.tokenisation import ChangedError, Progress, build
from clearhead.errors import ClearheadError
from clearhead.records import manifest
from clearhead.records.files import publish_folder, writing

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

    Reuse is by content: the hash of every text, the tokenizer and the split. Text and tokens are
    hashed once, and again when a file's size, times or inode changed. Tokens get their name by one
    rename when all are written; those of a process that was killed are made anew, and so are
    damaged ones. Of processes that need the same corpus at once, one makes it and the others wait.
    Memory stays at a few hundred MB.

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
    index = _verified(target, lambda line: None)
    with _alone(target, say) if index is None else nullcontext():
        if index is None and (index := _verified(target, say)) is None:
            shutil.rmtree(target, ignore_errors=True)
            with publish_folder(target, _ADVICE) as folder:
                try:
                    made = build(folder, tokenizer, config.vocabulary, sources, scanned, say)
                except ChangedError:
                    for source in sources:
                        survey(source, config.cache_folder).unlink(missing_ok=True)
                    raise
                manifest.seal(folder, made, name=_INDEX)
            index = made
        else:
            say(f"reusing the tokens in {target}")
        return _open(target, index, content, config, tokenizer, sources, scanned)


def _verified(target: Path, say: Progress) -> dict[str, Any] | None:
    """The manifest of a build; None where there is no build, or its files have changed."""
    if not target.is_dir():
        return None
    files = sorted(path for path in target.rglob("*") if path.is_file())
    state = state_of(files, [path.name for path in files])
    checked = target.parent.with_name("checked") / f"{target.name}.json"
    if (index := recall(checked, state)) is None:
        try:
            index = manifest.verify(target, name=_INDEX, advice="its tokens are made anew")
        except ClearheadError as error:
            say(str(error))
            return None
        keep(checked, state, index)
    return dict(index)


@contextmanager
def _alone(target: Path, say: Progress) -> Iterator[None]:
    """Keep other processes from making the same tokens."""
    place = target.parent.with_name("locks") / target.name
    with writing(target, _ADVICE):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("waiting for another process, which makes the same tokens")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _open(
    folder: Path,
    index: dict[str, Any],
    content: str,
    config: DataConfig,
    given: Any,
    sources: tuple[Source, ...],
    scanned: CorpusScan,
) -> Corpus:
    """Map a build."""
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
