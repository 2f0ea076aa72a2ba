"""Reading prompts into a key-value cache, once for what they share.

A prompt is a context and a tail. Prompts that start alike share the state of that start, and those
with the same context that of the context, where a token's state depends on nothing after it and
not on how long its row is. Rows of a batch end together: shorter ones are padded on the left, and
hidden by the mask, so that what a row gives does not depend on its neighbours.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from clearhead.diagnose.running import backbone
from clearhead.errors import ClearheadError
from clearhead.eval.frequencies import follow_length, forget, of_the_batch
from clearhead.eval.losses import LOGITS, head_makes_logits


class Prompt(NamedTuple):
    """Token ids: `context`, which other prompts may share, and `tail`, one token or more."""

    context: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.context + self.tail


@dataclass(kw_only=True)
class State:
    """Prompts that were read.

    Attributes:
        cache: of transformers; `mask` says which of its slots hold tokens, bool [B, S].
        logits: float [B, V], of the token after each prompt; while more are asked for [B, K, V],
            of the tokens after each of its last K, or their hidden states [B, K, C].
    """

    cache: Any
    mask: Tensor
    logits: Tensor


class Kept(NamedTuple):
    """Cached tokens of several rows, one row after another, without padding.

    Attributes:
        layers: keys and values of each, [N, H, D]; none where nothing is kept.
        rows: what the tokens are.
    """

    layers: list[tuple[Tensor, Tensor]]
    rows: list[tuple[int, ...]]

    def firsts(self) -> list[int]:
        """The place of each row's first token."""
        return list(accumulate(map(len, self.rows[:-1]), initial=0))


_NOTHING = Kept([], [()])


def joined(parts: Sequence[Kept]) -> Kept:
    """The rows of several."""
    parts = [part for part in parts if part.layers]
    if len(parts) < 2:
        return parts[0] if parts else _NOTHING
    layers = [
        (torch.cat([k for k, _ in each]), torch.cat([v for _, v in each]))
        for each in zip(*(part.layers for part in parts), strict=True)
    ]
    return Kept(layers, [row for part in parts for row in part.rows])


def _kept(cache: DynamicCache, rows: list[tuple[int, ...]], *, at_end: bool) -> Kept:
    """Rows that a cache holds, beside their padding."""
    slots = cache.get_seq_length()
    firsts = [slots - len(row) if at_end else 0 for row in rows]
    row_N = torch.cat([torch.full((len(row),), place) for place, row in enumerate(rows)])
    slot_N = _spans(firsts, list(map(len, rows)))
    layers = [
        (layer.keys[row_N, :, slot_N], layer.values[row_N, :, slot_N]) for layer in cache.layers
    ]
    return Kept(layers, rows)


def _spans(firsts: list[int], lengths: list[int]) -> Tensor:
    """Numbers that follow each first one, so many of each, all in a row."""
    spans = zip(firsts, lengths, strict=True)
    return torch.cat([torch.arange(first, first + length) for first, length in spans])


class Prefill:
    """Reads prompts with one model, and remembers the longest start that they shared.

    Attributes:
        shares: whether starts are shared: every layer must keep all its keys, and no frequency may
            follow the length of the row. Elsewhere, and where the caller wants `share` False, every
            prompt is read in full.
        pads: whether rows of unequal length may run together; not where transformers takes one
            frequency for the whole batch from its longest row.
    """

    def __init__(self, model: Any, *, share: bool = True) -> None:
        self._model = model
        names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in names
        self._takes_positions = "position_ids" in names
        self.pads = not of_the_batch(model)
        self.shares = share and _keeps_all(_cache_of(model)) and not follow_length(model)
        self._kept: Kept | None = None

    def read(self, prompts: Sequence[Prompt]) -> State:
        """Read a batch of prompts."""
        contexts = list(dict.fromkeys(prompt.context for prompt in prompts if prompt.context))
        read = _NOTHING
        forget(self._model)
        if self.shares and contexts:
            read = self._extend(self._start(contexts), [0] * len(contexts), contexts)
        state = self._after(read, prompts, 1)
        state.logits = state.logits[:, -1]
        return state

    @property
    def leads(self) -> bool:
        """Whether `begin` reads rows whole: where it keeps states, and logits are made of them."""
        return self.shares and self._head is not None

    def begin(
        self, rows: Sequence[tuple[int, ...]], shared: Sequence[int]
    ) -> tuple[Kept, Tensor | None]:
        """Read rows, where `shares`, and keep the first `shared` tokens of each for others.

        Padded on the right, which nothing before it sees: without a mask, attention takes its
        quickest path.

        Returns:
            What is kept, and the last hidden states of all tokens, [B, T, C]; none met the output
            matrix. Nothing and None where there is nothing to read.
        """
        if not self.shares or not any(rows):
            return _NOTHING, None
        ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for index, row in enumerate(rows):
            ids_BT[index, : len(row)] = torch.tensor(row)
        # Without a cache where nothing is shared: it would copy all keys and values.
        cache = DynamicCache() if any(shared) else None
        trunk = backbone(self._model)
        ids_BT = ids_BT.to(self._model.device)
        out = trunk(input_ids=ids_BT, past_key_values=cache, use_cache=cache is not None)
        if cache is None:
            return _NOTHING, out[0]
        starts = [row[:count] for row, count in zip(rows, shared, strict=True)]
        return _kept(cache, starts, at_end=False), out[0]

    def finish(
        self, begun: Kept, prompts: Sequence[Prompt], counts: Sequence[int]
    ) -> Iterator[Tensor]:
        """Read prompts whose contexts were begun, whole where they were not.

        Returns:
            The logits after the last `counts` tokens of each, all in a row: float [N, V], in parts.
        """
        forget(self._model)
        keep = max(counts)
        if self._head is None:
            last_BKV = self._after(begun, prompts, keep).logits
            return iter([row[keep - n :] for row, n in zip(last_BKV, counts, strict=True)])
        last_BKC = self._after(begun, prompts, keep, hidden=True).logits
        return self.logits(last_BKC, [keep] * len(prompts), counts)

    def logits(
        self, last_BTC: Tensor, ends: Sequence[int], counts: Sequence[int]
    ) -> Iterator[Tensor]:
        """Logits of the `counts` states before `ends` of each row, all in a row: [N, V], in parts.

        Of last hidden states, where `leads`.
        """
        rows = zip(last_BTC, ends, counts, strict=True)
        asked_NC = torch.cat([row[end - count : end] for row, end, count in rows])
        return map(self._head, asked_NC.split(max(1, LOGITS // len(self._head.weight))))

    @cached_property
    def _head(self) -> Any:
        """The output matrix, where logits are just that times the last hidden state."""
        few = torch.zeros(1, 2, dtype=torch.int64, device=self._model.device)
        known = head_makes_logits(self._model, few)
        return self._model.get_output_embeddings() if known else None

    def step(self, state: State, tokens_B: Tensor) -> None:
        """Append a token to each row of the state."""
        ones = state.mask.new_ones(len(state.mask), 1)
        state.mask = torch.cat([state.mask, ones], 1)
        state.logits = self._forward(state.cache, tokens_B[:, None], state.mask, 1).logits[:, -1]

    def follow(self, state: State, tokens_BT: Tensor) -> Tensor:
        """Append T tokens to each row in one pass: logits [B, T, V], of what is after each.

        Equal to T steps where `shares`; elsewhere the first would be read at the last one's length.
        """
        ones = state.mask.new_ones(tokens_BT.shape)
        state.mask = torch.cat([state.mask, ones], 1)
        logits = self._forward(state.cache, tokens_BT, state.mask, tokens_BT.shape[1]).logits
        state.logits = logits[:, -1]
        return logits

    def _start(self, contexts: list[tuple[int, ...]]) -> Kept:
        """The longest common start of the contexts, one row."""
        shared = contexts[0]
        for context in contexts[1:]:
            shared = shared[: common(shared, context)]
        if self._kept is None:
            self._kept = _NOTHING
        known = common(self._kept.rows[0], shared)
        if known == len(shared):  # no more than is kept: what is kept stays whole
            return self._kept
        start = self._extend(self._kept, [0], [shared])
        # A passkey's filler grows from cell to cell, but the next length begins with a short start
        # that leaves it early: the long one stays, unless it is of little use here.
        if len(shared) > len(self._kept.rows[0]) or known < len(shared) / 2:
            self._kept = start
        return start

    def _extend(self, kept: Kept, places: list[int], rows: list[tuple[int, ...]]) -> Kept:
        known = [common(kept.rows[place], row) for place, row in zip(places, rows, strict=True)]
        if known == list(map(len, rows)):
            firsts = kept.firsts()
            index_N = _spans([firsts[place] for place in places], known)
            return Kept([(k[index_N], v[index_N]) for k, v in kept.layers], rows)
        return _kept(self._onto(kept, places, rows, 1).cache, rows, at_end=True)

    def _after(
        self, kept: Kept, prompts: Sequence[Prompt], keep: int, *, hidden: bool = False
    ) -> State:
        """Read prompts of which some have their context among the kept rows."""
        places = {row: place for place, row in enumerate(kept.rows)}
        rows = [prompt.ids for prompt in prompts]
        each = [places.get(prompt.context, 0) for prompt in prompts]
        return self._onto(kept, each, rows, keep, hidden=hidden)

    def _onto(
        self,
        kept: Kept,
        places: list[int],
        rows: list[tuple[int, ...]],
        keep: int,
        *,
        hidden: bool = False,
    ) -> State:
        """Read `rows`, of which each has its start in the kept row at its place.

        All run as many new tokens as the one that needs most, so that padding, if any, is on the
        left of everything.
        """
        known = [common(kept.rows[place], row) for place, row in zip(places, rows, strict=True)]
        # At least the last tokens: their logits are asked for.
        new = max(max(len(row) - n, keep) for row, n in zip(rows, known, strict=True))
        reused = [max(0, len(row) - new) for row in rows]
        cache = None
        if any(reused):
            cache = DynamicCache()
            for index, (k, v) in enumerate(self._cut(kept, places, reused)):
                cache.update(k, v, index)
        return self._run(cache, rows, reused, keep, hidden)

    def _cut(
        self, kept: Kept, places: list[int], lengths: list[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """The first `lengths` tokens of the kept rows at `places`, right-aligned: [B, H, S, D]."""
        if not kept.layers:
            return []
        keys_NHD = kept.layers[0][0]
        firsts = kept.firsts()
        first_B = torch.tensor([firsts[place] for place in places], device=keys_NHD.device)
        length_B = torch.tensor(lengths, device=keys_NHD.device)
        slot_S = torch.arange(max(lengths), device=keys_NHD.device)
        # Padding takes some token or other: the mask hides it.
        index_BS = (slot_S - (max(lengths) - length_B)[:, None]).clamp_min(0) + first_B[:, None]
        index_BS = index_BS.clamp_max(len(keys_NHD) - 1)
        return [(k[index_BS].transpose(1, 2), v[index_BS].transpose(1, 2)) for k, v in kept.layers]

    def _run(
        self,
        cache: Any,
        rows: list[tuple[int, ...]],
        reused: list[int],
        keep: int,
        hidden: bool,
    ) -> State:
        """Run what is left of each row after its first `reused` tokens, which the cache holds."""
        device = self._model.device
        slots = max(map(len, rows))
        new = slots - max(reused)
        ids_BT = torch.zeros(len(rows), new, dtype=torch.int64)
        mask_BS = torch.zeros(len(rows), slots, dtype=torch.bool)
        for index, (row, n) in enumerate(zip(rows, reused, strict=True)):
            ids_BT[index, new - (len(row) - n) :] = torch.tensor(row[n:])
            mask_BS[index, slots - len(row) :] = True
        mask_BS = mask_BS.to(device)
        if cache is None:
            cache = DynamicCache() if self.shares else None
        out = self._forward(cache, ids_BT.to(device), mask_BS, keep, hidden)
        cache = getattr(out, "past_key_values", None)  # none of a recurrent model
        return State(cache=cache, mask=mask_BS, logits=out[0][:, -keep:])

    def _forward(
        self, cache: Any, ids_BT: Tensor, mask_BS: Tensor, keep: int, hidden: bool = False
    ) -> Any:
        positions = {}
        if self._takes_positions:
            count_BS = (mask_BS.long().cumsum(-1) - 1).clamp_min(0)
            positions = {"position_ids": count_BS[:, -ids_BT.shape[1] :]}
        run = backbone(self._model) if hidden else self._model
        return run(
            input_ids=ids_BT,
            attention_mask=mask_BS.long(),
            past_key_values=cache,
            use_cache=True,
            **positions,
            **({"logits_to_keep": keep} if self._keeps and not hidden else {}),
        )


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both start with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])


def _cache_of(model: Any) -> Any:
    """The cache that the model makes for itself."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = getattr(model(input_ids=token, use_cache=True), "past_key_values", None)
    if cache is None:
        raise ClearheadError(
            f"{type(model).__name__} gives no key-value cache (past_key_values), by which answers "
            "are read token by token: ask for perplexity or hits"
        )
    return cache


def _keeps_all(cache: Any) -> bool:
    """Whether every layer keeps the keys of all tokens, in the plain form that can be cut."""
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
