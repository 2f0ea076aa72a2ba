"""From a config to a corpus: scan the text, then reuse the tokens of before or make them."""

from pathlib import Path
from typing import Any

import numpy as np

from clearhead.data import journal, shards
from clearhead.data import tokenizer as tokenizers
from clearhead.data.config import DataConfig
from clearhead.data.corpus import SPLITS, Corpus, fingerprint_of, is_order_of
from clearhead.data.scan import CorpusScan, forget, scan
from clearhead.data.sources import Source, find
from clearhead.data.tokenisation import ChangedError, Progress, build, saved_tokenizer

# Raise it when the same text would give other tokens or other files than before.
_FORMAT = 1
_TRAINED = "byte-level BPE trained on the training documents"


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
    say = progress or (lambda line: None)
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = tokenizers.load(config.tokenizer)
    if tokenizer is None:
        identity = tokenizers.trained_identity(config.vocabulary)
    else:
        identity = tokenizers.loaded_identity(tokenizers.checked(tokenizer, closed=closed))
    sources = find(config, say)
    found = scan(sources, config.validation, config.cache_folder, say)
    # Of all that determines the tokens of a build.
    digests = [source.digest for source in found.sources]
    content = fingerprint_of(_FORMAT, identity, found.threshold, digests)
    weights = [source.weight for source in sources]
    if began is not None and not is_order_of(began, fingerprint_of(content, weights)):
        names = ", ".join(source.spec for source in sources)
        raise ChangedError(
            f"data {names}: the text or the tokenizer changed since the run began: put back what "
            "it was, or start another run, for which tokens are made of what it is now"
        )
    target = config.cache_folder / "corpora" / content[:32]
    while True:
        try:
            corpus = _open(target, content, config, tokenizer, sources, found)
            say(f"reusing the tokens in {target}")
            return corpus
        except (FileNotFoundError, NotADirectoryError):  # the second is refused below
            pass
        except shards.DamagedError as error:
            say(f"the tokens in {target} are damaged ({error}); making them anew")
        with shards.going_on(target, say) as folder:
            if folder is None:
                continue
            try:
                build(folder, content, tokenizer, config.vocabulary, sources, found, say)
            except ChangedError:
                forget(sources, config.cache_folder)
                journal.forget(folder)
                raise
            # Opened before it is published: what is mapped stays, whatever happens to the name.
            corpus = _open(folder, content, config, tokenizer, sources, found)
            journal.forget(folder)
            shards.publish(folder, target)
            return corpus


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
    tokenizer = saved_tokenizer(folder) if given is None else given
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
