"""Text to token ids: a byte-level BPE of our own, or any existing tokenizer."""

import importlib.metadata
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from clearhead.records.identity import digest_of

BEGIN = "<|begin|>"
"""The token before each document."""
END = "<|end|>"
"""The token after each document."""
PAD = "<|pad|>"
"""The token that fills rows up."""
_THREADS = "TOKENIZERS_PARALLELISM"
_CHOSEN = os.environ.get(_THREADS)  # read once, before anything here writes it


def train(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE, the same for the same texts byte for byte, of `vocabulary` entries or, from
    a tiny sample, fewer: a `transformers.PreTrainedTokenizerFast` that adds no special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with rust_threads():
        bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        # Decoder-only models take no segments, and generate from prompts that end together.
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def identity(tokenizer: Any, vocabulary: int) -> str:
    """A string that identifies a tokenizer's behaviour; None is a BPE yet to be trained."""
    if tokenizer is None:
        version = importlib.metadata.version("tokenizers")
        return f"byte-level BPE {vocabulary} by tokenizers {version}"
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id
    return digest_of([tokenizer.backend_tokenizer.to_str(), *ends])


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest id, which in a tokenizer with gaps is above its length."""
    return 1 + max(tokenizer.get_vocab().values())


def yielded(tokenizer: Any) -> dict[int, str]:
    """{id: entry} of the vocabulary entries whose own text encodes to that id; none is special."""
    added = tokenizer.added_tokens_decoder
    special = {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
    words = {id: word for word, id in tokenizer.get_vocab().items() if id not in special}
    texts = tokenizer.batch_decode([[id] for id in words])
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return {id: word for (id, word), own in zip(words.items(), ids, strict=True) if id in own}


class Encoder:
    """Encodes texts with special-token parsing, truncation and post-processing off. `begin` and
    `end` are the ids of the bos and eos tokens, if any; `dtype` is uint16 or uint32."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        # A copy: the user's own tokenizer keeps reading special tokens out of a prompt.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.begin: int | None = tokenizer.bos_token_id
        self.end: int | None = tokenizer.eos_token_id
        self.dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 1 << 16 else "<u4")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, 1-D of `dtype`, no BEGIN or END among them."""
        with rust_threads():
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(item.ids, dtype=self.dtype) for item in encoded]

    def pieces(self, *pieces: str) -> list[tuple[int, ...]]:
        """The ids of a text given in pieces, by piece; a token across two is the later piece's."""
        whole = self._backend.encode("".join(pieces), add_special_tokens=False)
        ends, place = list(accumulate(map(len, pieces))), 0
        ids: list[list[int]] = [[] for _ in pieces]
        for token, (_, stop) in zip(whole.ids, whole.offsets, strict=True):
            place = max(place, bisect_left(ends, stop))
            ids[place].append(token)
        return [tuple(one) for one in ids]


def cut(text: str, size: int) -> Iterator[str]:
    """Cut a text after line ends into pieces of at most `size` characters; long lines anywhere."""
    start = 0
    while len(text) - start > size:
        stop = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:stop]
        start = stop
    yield text[start:]


@contextmanager
def rust_threads() -> Iterator[None]:
    """Let tokenizers use every core, then one, so that a later fork has nothing to warn about,
    unless the user has set TOKENIZERS_PARALLELISM."""
    os.environ[_THREADS] = _CHOSEN or "true"
    try:
        yield
    finally:
        os.environ[_THREADS] = _CHOSEN or "false"
