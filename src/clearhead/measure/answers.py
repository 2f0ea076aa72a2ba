"""Answers of a model: transformers' greedy generation, and log-likelihoods of given answers.

Prompts share the cached keys and values of a common start, where a token's state depends neither on
later tokens nor on the length of its row. Rows of a batch end together: shorter ones are padded on
the left and masked, so that no row depends on its neighbours.
"""

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from clearhead.errors import ClearheadError
from clearhead.measure.rope_limits import check_length, follow_length, reset_dynamic_rope
from clearhead.models.inspection import evaluating, finite
from clearhead.models.pretrained import CACHE, cache_of
from clearhead.terminal import hushed

Ids = tuple[int, ...]


class Prompt(NamedTuple):
    """Token ids: `context`, which other prompts may share, and `tail`, one token or more."""

    context: Ids
    tail: Ids

    @property
    def ids(self) -> Ids:
        return self.context + self.tail


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        written: the tokens of greedy decoding, up to an end token or as many as were asked for.
        loss: −log p of each token of the given answer, its earlier ones given (teacher forcing).
        right: whether each of these tokens was the likeliest. All of them are if and only if greedy
            decoding starts with the whole answer.
    """

    written: Ids
    loss: tuple[float, ...]
    right: tuple[bool, ...]


class Batch(NamedTuple):
    """Prompts as left-padded rows.

    Attributes:
        ids: int64 [B, S]. mask: bool [B, S], False where padded.
        cache: of the first `held` columns; None where nothing is shared.
    """

    ids: Tensor
    mask: Tensor
    cache: Any = None
    held: int = 0


class Reader:
    """Reads prompts with one model, once for both greedy and forced answers.

    Args:
        model: a causal language model of transformers.
        batch_tokens: tokens of prompts and answers run together, at most (a single longer prompt
            runs alone); it changes speed and memory, not the answers.
        ends: the tokens that end an answer.

    Attributes:
        shares: True if prompts share a cached start: every layer keeps all its keys, and no
            frequency follows the length of the row. Elsewhere every prompt is read in full, and
            only prompts of one length run together.
    """

    def __init__(self, model: Any, *, batch_tokens: int, ends: Collection[int] = ()) -> None:
        self.model = model
        self._batch_tokens = batch_tokens
        self._ends = list(ends)
        self._names = inspect.signature(model.forward).parameters
        with evaluating(model):
            self.shares = _keeps_all(_cache_of(model)) and not follow_length(model)
        self._prefix: tuple[Ids, Any] = ((), DynamicCache())
        self._last: Any = None  # a prompt read whole, its logits and cache

    def ask(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Ids],
        *,
        new_tokens: int = 0,
        advanced: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Answers to the prompts, in their order.

        Args:
            prompts: those that share a context, or a long start, best stand together.
            answers: the right one of each, scored; may be empty.
            new_tokens: how many tokens greedy decoding writes; 0 leaves it out.
            advanced: called with the size of each batch.

        Raises:
            ClearheadError: a prompt and its answer longer than the model's positions; logits that
                are not finite.
        """
        lengths = [
            len(prompt.ids) + max(new_tokens, len(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        check_length(self.model, max(lengths))
        answered: dict[int, Answer] = {}
        for group in self._groups(prompts, lengths):
            with evaluating(self.model):
                batch = self.read([prompts[index] for index in group])
                forced = self._forced(batch, [answers[index] for index in group])
                written = self._greedy(batch, new_tokens)
            for index, (loss, right), tokens in zip(group, forced, written, strict=True):
                answered[index] = Answer(written=tokens, loss=loss, right=right)
            if advanced is not None:
                advanced(len(group))
        return [answered[index] for index in range(len(prompts))]

    def weigh(self, prompt: Prompt, answers: Sequence[Ids]) -> list[float]:
        """log p of each answer after one prompt, summed over its tokens, in nats."""
        found = self.ask([prompt] * len(answers), answers)
        return [-math.fsum(answer.loss) for answer in found]

    def read(self, prompts: Sequence[Prompt]) -> Batch:
        """Read all but the last token of each prompt, where prompts share a start."""
        rows = [prompt.ids for prompt in prompts]
        slots = max(map(len, rows))
        ids_BS = torch.tensor([[0] * (slots - len(row)) + list(row) for row in rows])
        padding_B = slots - torch.tensor(list(map(len, rows)))
        mask_BS = torch.arange(slots) >= padding_B[:, None]
        ids_BS, mask_BS = ids_BS.to(self.model.device), mask_BS.to(self.model.device)
        if not self.shares:
            return Batch(ids_BS, mask_BS)
        shared = _common([row[:-1] for row in rows])
        # All rows run as many new tokens as the one that needs most, so that all padding is on the
        # left of everything.
        new = slots - len(shared)
        cache = _first(self._start(shared), [max(0, len(row) - new) for row in rows])
        if new > 1:
            self.forward(Batch(ids_BS[:, :-1], mask_BS[:, :-1], cache, slots - new))
        return Batch(ids_BS, mask_BS, cache, slots - 1)

    def forward(self, batch: Batch, keep: int = 1) -> tuple[Tensor, Any]:
        """Run the columns that the cache does not hold: logits [B, keep, V] of the last ones, and
        the cache of all."""
        options: dict[str, Any] = {}
        if "position_ids" in self._names:
            position_BS = (batch.mask.long().cumsum(-1) - 1).clamp_min(0)
            options["position_ids"] = position_BS[:, batch.held :]
        if "logits_to_keep" in self._names:
            options["logits_to_keep"] = keep
        output = self.model(
            input_ids=batch.ids[:, batch.held :],
            attention_mask=batch.mask.long(),
            use_cache=True,
            **{CACHE: batch.cache},
            **options,
        )
        return output.logits[:, -keep:], cache_of(output)

    def _groups(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> Iterator[list[int]]:
        """Batches: neighbours; a context that several have is a batch's only one."""
        contexts = Counter(prompt.context for prompt in prompts)

        def alike(index: int) -> Any:
            context = prompts[index].context if contexts[prompts[index].context] > 1 else None
            return context if self.shares else len(prompts[index].ids)

        order = range(len(prompts))
        for _, neighbours in groupby(order if self.shares else sorted(order, key=alike), alike):
            group: list[int] = []
            for index in neighbours:
                longest = max(lengths[one] for one in (*group, index))
                if group and longest * (len(group) + 1) > self._batch_tokens:
                    yield group
                    group = []
                group.append(index)
            yield group

    def _start(self, shared: Ids) -> Any:
        """A cache of one row that begins with these tokens; the longest is kept."""
        prefix, kept = self._prefix
        known = len(_common([prefix, shared]))
        if known == len(shared):
            return kept
        cache = _first(kept, [known])
        ids_1S = torch.tensor([shared], device=self.model.device)
        self.forward(Batch(ids_1S, torch.ones_like(ids_1S, dtype=torch.bool), cache, known))
        # A passkey's filler grows from cell to cell, but the next length begins with a short start
        # that leaves it early: the long one stays, unless it is of little use here.
        if len(shared) > len(prefix) or known < len(shared) / 2:
            self._prefix = shared, cache
        return cache

    def _forced(
        self, batch: Batch, answers: list[Ids]
    ) -> list[tuple[tuple[float, ...], tuple[bool, ...]]]:
        """The loss of each token of the answers, and whether it was the likeliest."""
        longest = max(map(len, answers))
        if not longest:
            return [((), ())] * len(answers)
        target_BT = torch.tensor([[*answer, *[0] * (longest - len(answer))] for answer in answers])
        target_BT = target_BT.to(batch.ids.device)
        if self.shares:  # padding on the right: no earlier token sees it
            ids_BS = torch.cat([batch.ids, target_BT[:, :-1]], 1)
            mask_BS = torch.cat([batch.mask, torch.ones_like(target_BT[:, :-1]).bool()], 1)
            logits_BTV, _ = self.forward(batch._replace(ids=ids_BS, mask=mask_BS), longest)
            batch.cache.crop(-longest)
        else:
            logits_BTV = self._stepped(batch, target_BT)
        wide = finite(logits_BTV)
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        loss_BT = -wide.log_softmax(-1).gather(2, target_BT[..., None])[..., 0]
        right_BT = wide.argmax(-1) == target_BT
        return [
            (tuple(loss[: len(answer)]), tuple(right[: len(answer)]))
            for loss, right, answer in zip(
                loss_BT.tolist(), right_BT.tolist(), answers, strict=True
            )
        ]

    def _stepped(self, batch: Batch, target_BT: Tensor) -> Tensor:
        """Logits before each target, read one by one: each at the length that the text then has."""
        rows = len(batch.ids)
        row = tuple(batch.ids[0].tolist())
        reset_dynamic_rope(self.model)
        if bool((batch.ids == batch.ids[0]).all()):  # one prompt: read once for all its answers
            if self._last is None or self._last[0] != row:
                self._last = row, *self.forward(Batch(batch.ids[:1], batch.mask[:1]))
            _, logits_B1V, cache = copy.deepcopy(self._last)
            if rows > 1:
                cache.reorder_cache(torch.zeros(rows, dtype=torch.int64))
                logits_B1V = logits_B1V.expand(rows, -1, -1)
        else:
            logits_B1V, cache = self.forward(batch)
        found = [logits_B1V]
        for place in range(target_BT.shape[1] - 1):
            ids_BS = torch.cat([batch.ids, target_BT[:, place : place + 1]], 1)
            batch = Batch(ids_BS, torch.ones_like(ids_BS).bool(), cache, batch.ids.shape[1])
            logits_B1V, cache = self.forward(batch)
            found.append(logits_B1V)
        return torch.cat(found, 1)

    def _greedy(self, batch: Batch, new_tokens: int) -> list[Ids]:
        """Tokens by transformers' `generate`, up to an end."""
        if not new_tokens:
            return [()] * len(batch.ids)
        reset_dynamic_rope(self.model)
        config = GenerationConfig(
            max_new_tokens=new_tokens, eos_token_id=self._ends or None, pad_token_id=0
        )
        own = self.model.generation_config  # transformers takes from it what a call leaves out
        self.model.generation_config = GenerationConfig()
        try:
            # The trained length, of which transformers reminds, is exceeded on purpose.
            with hushed("transformers.generation.stopping_criteria"):
                written = self.model.generate(
                    batch.ids,
                    attention_mask=batch.mask.long(),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([finite]),
                    **({} if batch.cache is None else {CACHE: batch.cache}),
                )[:, batch.ids.shape[1] :].tolist()
        finally:
            self.model.generation_config = own
        ends = [[*map(self._ends.__contains__, row), True].index(True) for row in written]
        return [tuple(row[:end]) for row, end in zip(written, ends, strict=True)]


def ends_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End tokens: the tokenizer's, and those of the model's generation_config.

    A chat model's turn may end by another token than a text.
    """
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _common(rows: Sequence[Ids]) -> Ids:
    """The longest start of all rows: that of the first and the last of them in order."""
    one, other = min(rows), max(rows)
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (a, b) in pairs if a != b), len(one))]


def _first(cache: Any, counts: Sequence[int]) -> DynamicCache:
    """A copy of a cache's one row as several, each its first so many tokens, right-aligned."""
    rows = DynamicCache()
    longest = max(counts)
    for index, layer in enumerate(cache.layers if longest else ()):
        device = layer.keys.device
        padding_B1 = longest - torch.tensor(counts, device=device)[:, None]
        # Padding takes the first token or other: the mask hides it.
        slot_BS = (torch.arange(longest, device=device) - padding_B1).clamp_min(0)
        keys, values = (x[0][:, slot_BS].transpose(0, 1) for x in (layer.keys, layer.values))
        rows.update(keys, values, index)
    return rows


def _cache_of(model: Any) -> Any:
    """The cache that the model makes for itself."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = cache_of(model(input_ids=token, use_cache=True))
    if cache is None:
        raise ClearheadError(
            f"{type(model).__name__} gives no key-value cache, by which answers "
            "are read token by token: ask for perplexity or hits"
        )
    return cache


def _keeps_all(cache: Any) -> bool:
    """True if every layer keeps the keys of all tokens, in the plain form that can be cut."""
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
