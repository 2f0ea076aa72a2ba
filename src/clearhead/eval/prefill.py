"""Reading prompts into a key-value cache, once for what they share.

A prompt is a context and a tail. Prompts that start alike share the state of that start, and those
with the same context that of the context, where a token's state depends on nothing after it and
not on how long its row is. Rows of a batch end together: shorter ones are padded on the left, and
hidden by the mask, so that what a row gives does not depend on its neighbours.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from clearhead.errors import ClearheadError
from clearhead.eval.frequencies import follow_length, forget, of_the_batch


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
        logits: float [B, V], of the token after each prompt; while a batch of tails is read
            [B, K, V], of the tokens after each of its last K.
    """

    cache: Any
    mask: Tensor
    logits: Tensor


class _Kept(NamedTuple):
    """Rows of cached tokens, right-aligned: keys and values of each layer, and what they are of."""

    layers: list[tuple[Tensor, Tensor]]
    rows: list[tuple[int, ...]]


class Prefill:
    """Reads prompts with one model, and remembers the longest start that they shared.

    Attributes:
        shares: whether starts are shared: every layer must keep all its keys, and no frequency may
            follow the length of the row. Elsewhere every prompt is read in full.
        pads: whether rows of unequal length may run together; not where transformers takes one
            frequency for the whole batch from its longest row.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in names
        self._takes_positions = "position_ids" in names
        self.pads = not of_the_batch(model)
        self.shares = _keeps_all(_cache_of(model)) and not follow_length(model)
        self._kept: _Kept | None = None

    def read(self, prompts: Sequence[Prompt]) -> State:
        """Read a batch of prompts."""
        state = self._read(prompts, keep=1)
        state.logits = state.logits[:, -1]
        return state

    def tails(self, prompts: Sequence[Prompt]) -> Tensor:
        """The logits after every token of each tail: float [B, longest tail, V].

        Shorter tails end with the longest: a row's first places are then its context's, or nothing.
        """
        return self._read(prompts, keep=max(len(prompt.tail) for prompt in prompts)).logits

    def _read(self, prompts: Sequence[Prompt], keep: int) -> State:
        forget(self._model)
        rows = [prompt.ids for prompt in prompts]
        if not self.shares:
            return self._run(None, rows, [0] * len(rows), keep)
        contexts = list(dict.fromkeys(prompt.context for prompt in prompts if prompt.context))
        if not contexts:
            return self._run(None, rows, [0] * len(rows), keep)
        start = self._start(contexts)
        read = self._extend(start, [0] * len(contexts), contexts)
        places = {context: place for place, context in enumerate(contexts)}
        return self._onto(read, [places.get(prompt.context, 0) for prompt in prompts], rows, keep)

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

    def _start(self, contexts: list[tuple[int, ...]]) -> _Kept:
        """The longest common start of the contexts, one row."""
        shared = contexts[0]
        for context in contexts[1:]:
            shared = shared[: _common(shared, context)]
        if self._kept is None:
            self._kept = _Kept([], [()])
        known = _common(self._kept.rows[0], shared)
        if known == len(shared):  # no more than is kept: what is kept stays whole
            return self._kept
        start = self._extend(self._kept, [0], [shared])
        # A passkey's filler grows from cell to cell, but the next length begins with a short start
        # that leaves it early: the long one stays, unless it is of little use here.
        if len(shared) > len(self._kept.rows[0]) or known < len(shared) / 2:
            self._kept = start
        return start

    def _extend(self, kept: _Kept, places: list[int], rows: list[tuple[int, ...]]) -> _Kept:
        known = [_common(kept.rows[place], row) for place, row in zip(places, rows, strict=True)]
        if known == list(map(len, rows)):
            return _Kept(self._cut(kept, places, [len(row) for row in rows]), rows)
        cache = self._onto(kept, places, rows, 1).cache
        return _Kept([(layer.keys, layer.values) for layer in cache.layers], rows)

    def _onto(
        self, kept: _Kept, places: list[int], rows: list[tuple[int, ...]], keep: int
    ) -> State:
        """Read `rows`, of which each has its start in the kept row at its place.

        All run as many new tokens as the one that needs most, so that padding, if any, is on the
        left of everything.
        """
        known = [_common(kept.rows[place], row) for place, row in zip(places, rows, strict=True)]
        # At least the last tokens: their logits are asked for.
        new = max(max(len(row) - n, keep) for row, n in zip(rows, known, strict=True))
        reused = [max(0, len(row) - new) for row in rows]
        cache = None
        if any(reused):
            cache = DynamicCache()
            for index, (k, v) in enumerate(self._cut(kept, places, reused)):
                cache.update(k, v, index)
        return self._run(cache, rows, reused, keep)

    def _cut(
        self, kept: _Kept, places: list[int], lengths: list[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """The first `lengths` tokens of the kept rows at `places`, right-aligned again."""
        if not kept.layers:
            return []
        slots = kept.layers[0][0].shape[2]
        device = kept.layers[0][0].device
        first_B = torch.tensor([slots - len(kept.rows[place]) for place in places], device=device)
        length_B = torch.tensor(lengths, device=device)
        slot_S = torch.arange(max(lengths), device=device)
        # Padding takes some slot or other: the mask hides it.
        index_BS = (slot_S - (max(lengths) - length_B)[:, None]).clamp_min(0) + first_B[:, None]
        place_B1 = torch.tensor(places, device=device)[:, None]
        return [
            (k[place_B1, :, index_BS].transpose(1, 2), v[place_B1, :, index_BS].transpose(1, 2))
            for k, v in kept.layers
        ]

    def _run(self, cache: Any, rows: list[tuple[int, ...]], reused: list[int], keep: int) -> State:
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
        out = self._forward(cache, ids_BT.to(device), mask_BS, keep)
        return State(cache=out.past_key_values, mask=mask_BS, logits=out.logits[:, -keep:])

    def _forward(self, cache: Any, ids_BT: Tensor, mask_BS: Tensor, keep: int) -> Any:
        positions = {}
        if self._takes_positions:
            count_BS = (mask_BS.long().cumsum(-1) - 1).clamp_min(0)
            positions = {"position_ids": count_BS[:, -ids_BT.shape[1] :]}
        return self._model(
            input_ids=ids_BT,
            attention_mask=mask_BS.long(),
            past_key_values=cache,
            use_cache=True,
            **positions,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
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
