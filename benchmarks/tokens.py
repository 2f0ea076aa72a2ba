"""Making the tokens of a corpus against the tokenizer alone."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.race import Ratio, ratio_of
from benchmarks.timing import take_turns
from clearhead.data import DataConfig, prepare
from clearhead.data.sources import find
from clearhead.data.tokenizer import rust_threads, train

SIZE = 4 << 20


def tokens(rounds: int) -> Iterator[Ratio]:
    """4 MiB of Python's library, read, scanned, tokenised, hashed and stored by `prepare`, against
    one call of the tokenizer with all of its texts in memory. Both may use every core. And CPU
    seconds of all cores, which other work on the machine does not change."""
    config = DataConfig(limit=SIZE)
    (source,) = find(config, lambda line: None)
    texts = [document.text for document in source.documents(Counter())]
    tokenizer = train(texts, config.vocabulary)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as cache:
            prepare(replace(config, cache=Path(cache)), tokenizer=tokenizer)

    def alone() -> None:
        with rust_threads():
            tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    sides = {"prepare": ours, "tokenizers": alone}
    busy: dict[str, list[float]] = {name: [] for name in sides}

    def counted(name: str) -> None:
        before = time.process_time()
        sides[name]()
        busy[name].append(time.process_time() - before)

    seconds = take_turns({name: partial(counted, name) for name in sides}, rounds)
    yield ratio_of("tokens", "prepare", "tokenizers", 1.25, seconds)
    yield ratio_of("tokens, CPU", "prepare", "tokenizers", 1.25, busy)
