"""Windows of tokens, and masks of them, that are pure functions of (seed, step)."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from clearhead.data.corpus import Corpus
from clearhead.data.seeded import feistel, permutation, raw_numbers
from clearhead.data.tokenizer import vocabulary_size
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of
from clearhead.settings.data import SHARE

BLOCK = 1000  # sequences over which the weights of sources are met exactly
IGNORED = -100  # a label that counts for nothing, as in Hugging Face models
COMPUTED = 1 << 20  # windows; the order of a larger pool is computed at each read, not stored
MASK = "<|mask|>"
"""The token that stands for a hidden one."""
_SHOWN_AS_MASK, _SHOWN_AS_ANOTHER = 0.8, 0.1  # BERT's rule; the rest is shown as it is
_KEPT = 4  # permutations held at once; a batch needs two a pool where two epochs meet


class Batches:
    """Random-access batches of packed windows of the training text.

    Window i of a stream covers tokens [i(T-1), i(T-1) + T): a window of T tokens gives T-1 targets,
    so with one token of overlap every token but a stream's first is a target once an epoch. What is
    left at the end of a stream, less than a window, is not used.

    Without weights the windows of all sources are one pool, visited in a fresh seeded permutation
    every epoch. With weights each source is a pool with its own epochs, and any 1000 sequences from
    a multiple of 1000 on hold each source's exact share (the largest remainders round up).

    Args:
        corpus: from `prepare`.
        sequence_length: T, tokens a window, at least 2.
        batch_size: B, windows a batch.
        seed: of the order, any integer.
        accumulation: batches in a step, so that no step reads a window twice.
        document_masks: whether batches mark documents (see `batch`).
        begin: token that replaces every window's first, itself a target of the window before.
        began: recorded `fingerprint` (of corpus and order) of the run to resume.

    Raises:
        ClearheadError: fewer windows than one step takes, or a weighted source that is never read.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        accumulation: int = 1,
        document_masks: bool = False,
        begin: int | None = None,
        began: str | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.document_masks = document_masks
        self.begin = begin
        self._streams = corpus.streams["train"]
        lengths = list(map(len, self._streams))
        counts = [max(length - 1, 0) // (sequence_length - 1) for length in lengths]
        total, tokens = sum(counts), sum(lengths)
        if total < accumulation * batch_size:
            raise ClearheadError(
                f"the train split holds {tokens:,} tokens, {total} windows of {sequence_length}, "
                f"but a step takes {accumulation} x {batch_size} windows "
                f"({accumulation * batch_size * sequence_length:,} tokens): give more data, or a "
                "smaller accumulation, batch_size or sequence_length"
            )
        # Of each pool the cumulative windows of its streams, and its sequences in a block.
        self._pools, self._quotas = [np.cumsum(counts)], [BLOCK]
        if weights := [one.weight for one in self._streams if one.weight is not None]:
            self._pools = [np.array([count]) for count in counts]
            self._quotas = apportion(BLOCK, weights)
            for stream, count, quota in zip(self._streams, counts, self._quotas, strict=True):
                if not (count and quota):
                    raise ClearheadError(
                        f"data {stream.spec!r} would never be read: its train split holds "
                        f"{count} windows of {sequence_length}, and its weight {stream.weight} is "
                        f"{quota} in {BLOCK} of all: give more text, more weight, or none of it"
                    )
        largest = max(int(ends[-1]) for ends in self._pools)
        before = (began or "").partition(",")[0] == corpus.fingerprint
        self._computes = largest >= COMPUTED and not before
        self.fingerprint = corpus.fingerprint
        if self._computes:
            self.fingerprint = digest_of([corpus.fingerprint, "feistel"])
        self._permutation = lru_cache(_KEPT * len(self._pools))(
            lambda purpose, size: permutation(f"seed {seed}, {purpose}", size)
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step, counted from 0.

        Returns:
            "input_ids" and "labels", int64 [B, T], the same tokens: Hugging Face models shift.
            With document masks also "document_ids", int64 [B, T], 0, 1, 2 … from the window's
            first token on, and "position_ids", int64 [B, T], 0 again at each document's first
            token; there the label is -100, since the token before is of another document.
        """
        first = step * self.batch_size
        places = [self._place(number) for number in range(first, first + self.batch_size)]
        length = self.sequence_length
        ids_BT = np.stack([self._streams[one].window(start, length) for one, start in places])
        if self.begin is not None:
            ids_BT[:, 0] = self.begin
        input_ids = torch.from_numpy(ids_BT)
        if not self.document_masks:
            return {"input_ids": input_ids, "labels": input_ids.clone()}
        opens_BT = np.stack([self._streams[one].openings(start, length) for one, start in places])
        return {"input_ids": input_ids, **document_inputs(input_ids, torch.from_numpy(opens_BT))}

    def _place(self, number: int) -> tuple[int, int]:
        """Stream and first token of the `number`-th sequence of the run."""
        pool, visit = 0, number  # which pool, and how many sequences came from it before
        if len(self._pools) > 1:
            block, offset = divmod(number, BLOCK)
            order = self._permutation(f"block {block}", BLOCK)[: offset + 1]
            # Below the first quota an entry stands for the first pool, from there on the second …
            *before, pool = np.searchsorted(np.cumsum(self._quotas), order, side="right").tolist()
            visit = block * self._quotas[pool] + before.count(pool)
        ends = self._pools[pool]
        size = int(ends[-1])
        epoch, turn = divmod(visit, size)
        purpose = f"epoch {epoch} of pool {pool}"
        if self._computes and size >= COMPUTED:
            window = feistel(f"seed {self.seed}, {purpose}", size, turn)
        else:
            window = int(self._permutation(purpose, size)[turn])
        stream = int(np.searchsorted(ends, window, side="right"))
        window -= int(ends[stream - 1]) if stream else 0
        return pool + stream, window * (self.sequence_length - 1)


def document_inputs(ids_BT: torch.Tensor, opens_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Labels, positions and documents of int64 windows, as in `Batches.batch`; documents begin
    where `opens_BT`, bool, is True."""
    index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    began_BT = torch.where(opens_BT, index_T, 0).cummax(dim=1).values
    return {
        "labels": ids_BT.masked_fill(opens_BT, IGNORED),
        "position_ids": index_T - began_BT,
        "document_ids": opens_BT.cumsum(dim=1) - opens_BT[:, :1].long(),
    }


def document_starts(ids_BT: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Starts of documents within windows, bool [B, T]: tokens that follow an end token and, if the
    tokenizer has a begin token, are one. A window's first token is never marked."""
    opens_BT = F.pad(ids_BT[:, :-1] == tokenizer.eos_token_id, (1, 0))
    if tokenizer.bos_token_id is not None:
        opens_BT &= ids_BT == tokenizer.bos_token_id
    return opens_BT


def windows(
    corpus: Corpus,
    *,
    split: str = "validation",
    length: int,
    count: int | None = None,
    at: Literal["anywhere", "documents"] = "anywhere",
    seed: int = 0,
) -> Iterator[torch.Tensor]:
    """Yield windows for evaluation, int64 [length]: text in order, without overlap.

    Streams are cut from their first token on; with `at="documents"` each document with `length`
    tokens gives its beginning. Weights play no part. Sources share `count` windows, or all if there
    are fewer, in proportion to their own: the first, or under a `seed` other than 0 random ones.

    Raises:
        ClearheadError: at the call, where the split holds no window of this length.
    """
    streams = corpus.split(split)
    places: list[Any] = [range(0, len(one) - length + 1, length) for one in streams]
    if at == "documents":
        places = [s.starts[np.diff(s.starts, append=len(s)) >= length] for s in streams]
    available = list(map(len, places))
    if not any(available):
        raise ClearheadError(
            f"the {split} split holds {sum(map(len, streams)):,} tokens, in no "
            f"{'source' if at == 'anywhere' else 'document'} enough for one window of {length}; "
            "give more data, a larger validation share or a shorter length"
        )
    if count is not None and count < sum(available):
        available = apportion(count, available)

    def cut() -> Iterator[torch.Tensor]:
        for stream, starts, number in zip(streams, places, available, strict=True):
            if seed:
                drawn = permutation(f"windows {seed}", len(starts))[:number]
                starts = np.asarray(starts)[np.sort(drawn)]
            for start in starts[:number]:
                yield torch.from_numpy(stream.window(start, length))

    return cut()


def apportion(seats: int, weights: Sequence[float]) -> list[int]:
    """Share out `seats` by weight; the largest remainders round up, the earlier one of equals."""
    exact = [seats * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: seats - sum(shares)]:
        shares[i] += 1
    return shares


def with_mask_token(corpus: Corpus) -> Corpus:
    """The corpus with a mask token in its tokenizer: its own, or `MASK` as a new entry.
    No text encodes to it, so tokens and fingerprint are unchanged."""
    if corpus.tokenizer.mask_token_id is not None:
        return corpus
    tokenizer = copy.deepcopy(corpus.tokenizer)
    tokenizer.add_special_tokens({"mask_token": MASK})
    size = max(corpus.vocabulary_size, vocabulary_size(tokenizer))
    return replace(corpus, tokenizer=tokenizer, vocabulary_size=size)


class Masking:
    """Hides a share of each row's ordinary tokens; special ones are never hidden.

    Of the hidden tokens 80 % are shown as the mask token, 10 % as a random ordinary token and 10 %
    as they are (arXiv 1810.04805, section 3.1). The number hidden in a row is the `share`, between
    0 and 1, of its ordinary tokens rounded, and at least one. A tokenizer without a mask token is a
    ClearheadError.
    """

    def __init__(self, tokenizer: Any, share: float = SHARE) -> None:
        if tokenizer.mask_token_id is None:
            raise ClearheadError(
                "this tokenizer has no mask token: clearhead.data.with_mask_token adds one"
            )
        self.share = share
        self.mask_id: int = tokenizer.mask_token_id
        self._special = np.array(sorted(tokenizer.all_special_ids))
        known = np.array(sorted(tokenizer.get_vocab().values()))
        self._ordinary = np.setdiff1d(known, self._special)

    def __call__(self, ids_BT: np.ndarray, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Masked inputs and labels, int64 [B, T] each, functions of `label`; labels are −100
        where no token is hidden."""
        raw = raw_numbers(label, 3 * ids_BT.size).reshape(3, *ids_BT.shape)
        ordinary_BT = ~np.isin(ids_BT, self._special)
        # Ranks of random numbers; those of special tokens come last.
        order_BT = np.where(ordinary_BT, raw[0] >> 1, np.iinfo(np.uint64).max)
        rank_BT = order_BT.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        found_B = ordinary_BT.sum(axis=1)
        count_B = np.minimum(np.maximum(np.rint(self.share * found_B), 1), found_B)
        hidden_BT = rank_BT < count_B[:, None]
        fate_BT = raw[1] / 2.0**64
        shown_BT = np.where(hidden_BT & (fate_BT < _SHOWN_AS_MASK), self.mask_id, ids_BT)
        other_BT = self._ordinary[raw[2] % len(self._ordinary)]
        swapped_BT = (fate_BT >= _SHOWN_AS_MASK) & (fate_BT < _SHOWN_AS_MASK + _SHOWN_AS_ANOTHER)
        shown_BT = np.where(hidden_BT & swapped_BT, other_BT, shown_BT)
        return shown_BT, np.where(hidden_BT, ids_BT, IGNORED)


class MaskedBatches:
    """`Batches` with hidden tokens: other ones at every visit of a window, the same in every run.

    Labels are at the hidden tokens' own positions, not shifted: the `objective` is "mlm".
    """

    objective = "mlm"

    def __init__(self, batches: Batches, masking: Masking) -> None:
        self.batches = batches
        self.masking = masking
        self.begin = batches.begin
        self.fingerprint = f"{batches.fingerprint}, {masking.share} hidden"

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """As `Batches.batch`; "input_ids" as shown, "labels" only at the hidden places."""
        batch = self.batches.batch(step)
        label = f"seed {self.batches.seed}, masks of batch {step}"
        shown, labels = self.masking(batch["input_ids"].numpy(), label)
        return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}
