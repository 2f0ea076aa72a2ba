"""Windows of tokens in an order that is a pure function of (seed, step).

Any step's batch can be computed at any time, in any process, at the cost of that batch (and, on
entering an epoch of a small pool, of its permutation); resuming a run needs only the step number.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from clearhead.data.corpus import Corpus
from clearhead.data.seeded import Feistel, permutation
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of

BLOCK = 1000  # sequences over which the weights of sources are met exactly
IGNORED = -100  # a label that counts for nothing, as in Hugging Face models
# A pool of so many windows has its order computed where it is read. Up to 2026-11 every order was
# written out, as those of smaller pools still are.
COMPUTED = 1 << 20
_KEPT = 4  # permutations held at once; a batch needs two a pool where two epochs meet


class Batches:
    """Random-access batches of packed windows.

    Window i of a stream covers tokens [i(T-1), i(T-1) + T): a window of T tokens gives T-1 targets,
    so with one token of overlap every token but a stream's first is a target once an epoch. What is
    left at the end of a stream, less than a window, is not used.

    Without weights the windows of all sources are one pool, visited in a fresh seeded permutation
    every epoch. With weights each source is a pool of its own, with its own epochs, and any
    1000 sequences from a multiple of 1000 on hold each source's exact share (the largest remainders
    round up), in a seeded order.

    Attributes:
        fingerprint: hash of the corpus, and the order of its windows; a run resumes only on
            batches with its own.

    Args:
        corpus: from `prepare`; its training text.
        sequence_length: T, tokens a window, at least 2.
        batch_size: B, windows a batch.
        seed: of the order, any integer.
        accumulation: batches in a step, so that no step reads a window twice.
        document_masks: whether batches mark documents (see `batch`).
        begin: token that replaces every window's first, itself a target of the window before.
        began: recorded fingerprint of the run to resume; one written by an earlier version selects
            that version's order, held in memory.

    Raises:
        ClearheadError: fewer windows than one step takes, a weighted source without a window or
            with a weight below 1 in 1000, or a length or size that is too small.
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
        self._windows = [max(length - 1, 0) // (sequence_length - 1) for length in lengths]
        total, tokens = sum(self._windows), sum(lengths)
        if total < accumulation * batch_size:
            raise ClearheadError(
                f"the train split holds {tokens:,} tokens, {total} windows of {sequence_length}, "
                f"but a step takes {accumulation} x {batch_size} windows "
                f"({accumulation * batch_size * sequence_length:,} tokens): give more data, or a "
                "smaller accumulation, batch_size or sequence_length"
            )
        self._pools, self._quotas = self._make_pools()
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

    def _make_pools(self) -> tuple[list[np.ndarray], list[int]]:
        """For each pool the cumulative number of windows of its streams, and its number of
        sequences in a block."""
        weights = [stream.weight for stream in self._streams if stream.weight is not None]
        if not weights:
            return [np.cumsum(self._windows)], [BLOCK]
        quotas = apportion(BLOCK, weights)
        for stream, windows, quota in zip(self._streams, self._windows, quotas, strict=True):
            if not windows:
                raise ClearheadError(
                    f"data {stream.spec!r}: its train split holds {len(stream)} tokens, fewer "
                    f"than one window of {self.sequence_length}: give more, or no weight"
                )
            if not quota:
                raise ClearheadError(
                    f"data {stream.spec!r} has weight {stream.weight} of {sum(weights)} in all: "
                    f"below 1 in {BLOCK}, so it would never be read; raise it or leave it out"
                )
        return [np.array([windows]) for windows in self._windows], quotas

    def _place(self, number: int) -> tuple[int, int]:
        """Stream and first token of the `number`-th sequence of the run."""
        pool, visit = self._turn(number)
        ends = self._pools[pool]
        size = int(ends[-1])
        epoch, turn = divmod(visit, size)
        purpose = f"epoch {epoch} of pool {pool}"
        if self._computes and size >= COMPUTED:
            window = Feistel(f"seed {self.seed}, {purpose}", size)[turn]
        else:
            window = int(self._permutation(purpose, size)[turn])
        stream = int(np.searchsorted(ends, window, side="right"))
        window -= int(ends[stream - 1]) if stream else 0
        return pool + stream, window * (self.sequence_length - 1)

    def _turn(self, number: int) -> tuple[int, int]:
        """The pool of the `number`-th sequence, and how many came from that pool before it."""
        if len(self._pools) == 1:
            return 0, number
        block, offset = divmod(number, BLOCK)
        order = self._permutation(f"block {block}", BLOCK)[: offset + 1]
        # Below the first quota an entry stands for the first pool, from there on for the second …
        *before, pool = np.searchsorted(np.cumsum(self._quotas), order, side="right").tolist()
        return pool, block * self._quotas[pool] + before.count(pool)


def document_inputs(ids_BT: torch.Tensor, opens_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Model arguments under which a token sees only its own document.

    Args:
        ids_BT: the windows, int64.
        opens_BT: where documents begin, bool.

    Returns:
        "labels", "position_ids" and "document_ids", int64 [B, T], as `Batches.batch` has them.
    """
    index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    began_BT = torch.where(opens_BT, index_T, 0).cummax(dim=1).values
    return {
        "labels": ids_BT.masked_fill(opens_BT, IGNORED),
        "position_ids": index_T - began_BT,
        "document_ids": opens_BT.cumsum(dim=1) - opens_BT[:, :1].long(),
    }


def document_starts(ids_BT: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Where documents begin in windows, bool [B, T]: after an end token, or at a begin token if the
    tokenizer has one; both may be the same token, as in GPT-2.

    A window's first token is not marked, since no token precedes it.
    """
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

    Each stream is cut from its first token on, or with `at="documents"` is each document's
    beginning, of those as long as a window; weights play no part. `count` windows are shared among
    the sources by how many each holds, and are the first of each, or under another `seed` than 0
    drawn from all of it; where there are fewer, all come.

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

    def chosen(starts: Any, number: int) -> Any:
        if not seed:
            return starts[:number]
        return np.asarray(starts)[np.sort(permutation(f"windows {seed}", len(starts))[:number])]

    return (
        torch.from_numpy(stream.window(start, length))
        for stream, starts, number in zip(streams, places, available, strict=True)
        for start in chosen(starts, number)
    )


def apportion(seats: int, weights: Sequence[float]) -> list[int]:
    """Share out `seats` by weight; the largest remainders round up, the earlier one of equals."""
    exact = [seats * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: seats - sum(shares)]:
        shares[i] += 1
    return shares
