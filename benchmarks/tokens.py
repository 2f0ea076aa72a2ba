"""Making the tokens of a corpus against the tokenizer alone."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.race import Ratio, ratio_of
from clearhead.data import DataConfig, prepare
from clearhead.data.sources import find
from clearhead.data.tokenizer import rust_threads, train
from clearhead.experiments.timing import take_turns

SIZE = 4 << 20


def tokens(rounds: int) -> Iterator[Ratio]:
    """4 MiB of Python's library, read, scanned, tokenised, hashed and stored by `prepare`, against
    one call of the tokenizer with all of its texts in memory. Both may use every core."""
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

    seconds = take_turns({"prepare": ours, "tokenizers": alone}, rounds)
    yield ratio_of("tokens", "prepare", "tokenizers", 1.25, seconds)
