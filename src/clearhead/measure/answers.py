"""Answers of a model: transformers' greedy generation, and log-likelihoods of given answers.

Prompts of one length run together, without padding, so that no row depends on its neighbours.
"""

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from clearhead.errors import ClearheadError
from clearhead.models import ClearheadConfig
from clearhead.models.base_model import CACHE, cache_of
from clearhead.models.inspection import evaluating, finite, require_positions
from clearhead.terminal import hushed

Ids = tuple[int, ...]


class Prompt(NamedTuple):
    """Token ids: `context`, which other prompts may share, and `tail`, one token or more; then the
    `answer` to score, if any."""

    context: Ids
    tail: Ids
    answer: Ids = ()

    @property
    def ids(self) -> Ids:
        return self.context + self.tail


class Answer(NamedTuple):
    """`written`, the tokens of greedy decoding up to an end token; of each token of the prompt's
    answer after its earlier ones (teacher forcing) `loss`, −log p, and `right` if the likeliest."""

    written: Ids
    loss: tuple[float, ...]
    right: tuple[bool, ...]


class Reader:
    """Reads prompts with one model, once for both greedy and forced answers: at most `batch_tokens`
    together; `ends` end answers. Prompts share a cached start (`shares`) if every layer keeps all
    its keys, and no frequency follows the length of the row."""

    def __init__(self, model: Any, batch_tokens: int, ends: Collection[int] = ()) -> None:
        self.model = model
        self._batch_tokens = batch_tokens
        self._ends = list(ends)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        with evaluating(model):
            self.shares = _keeps_all(model) and not follow_length(model)
        self._start: tuple[Ids, Any] = ((), DynamicCache())  # tokens read, and their cache

    def ask(self, prompts: Sequence[Prompt], *, new_tokens: int = 0) -> list[Answer]:
        """Score each prompt's answer and decode `new_tokens` greedily, in order. Prompts that share
        a long prefix should be adjacent."""
        lengths = {one: len(one.ids) + max(new_tokens, len(one.answer)) for one in prompts}
        require_positions(self.model, max(lengths.values()), "give shorter texts or answers")
        # A batch has prompts of one length; a context that several have is a batch's only one.
        contexts = Counter(prompt.context for prompt in prompts)
        groups = defaultdict(list)
        for prompt in lengths:
            own = prompt.context if self.shares and contexts[prompt.context] > 1 else ()
            groups[len(prompt.ids), own].append(prompt)
        answers: dict[Prompt, Answer] = {}
        for group in groups.values():
            rows = max(1, self._batch_tokens // max(lengths[prompt] for prompt in group))
            for start in range(0, len(group), rows):
                part = group[start : start + rows]
                with evaluating(self.model):
                    ids_BS, unread_BT, cache = self.read(part)
                    forced = self._forced(ids_BS, unread_BT, cache, [one.answer for one in part])
                    written = self._greedy(ids_BS, cache, new_tokens)
                for prompt, tokens, scores in zip(part, written, forced, strict=True):
                    answers[prompt] = Answer(tokens, *scores)
        return [answers[prompt] for prompt in prompts]

    def read(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor, Any]:
        """Read the start that prompts of one length share, all but the last token at most: all ids,
        int64 [B, S], the columns left to read, and the cache, None where prompts share none."""
        ids_BS = torch.tensor([prompt.ids for prompt in prompts], device=self.model.device)
        if not self.shares:
            return ids_BS, ids_BS, None
        shared = _common([prompt.ids[:-1] for prompt in prompts])
        tokens, cache = self._start
        known = len(_common([tokens, shared]))
        if known < len(shared):
            cache.crop(known - len(tokens))
            cache = cache if known else DynamicCache()
            self.forward(torch.tensor([shared[known:]], device=self.model.device), cache)
            tokens = shared
            self._start = tokens, cache
        cache = copy.deepcopy(cache) if shared else DynamicCache()
        cache.crop(len(shared) - len(tokens))
        cache.reorder_cache(torch.zeros(len(prompts), dtype=torch.int64))
        return ids_BS, ids_BS[:, len(shared) :], cache

    def forward(self, ids_BT: Tensor, cache: Any, keep: int = 1) -> tuple[Tensor, Any]:
        """Read tokens after those of the cache: the last logits [B, keep, V], and the new cache."""
        options: dict[str, Any] = {CACHE: cache, "use_cache": True}
        if self._keeps:
            options["logits_to_keep"] = keep
        output = self.model(input_ids=ids_BT, **options)
        return output.logits[:, -keep:], cache_of(output)

    def _forced(
        self, ids_BS: Tensor, unread_BT: Tensor, cache: Any, answers: list[Ids]
    ) -> list[tuple[tuple[float, ...], tuple[bool, ...]]]:
        """The loss of each token of the answers, and whether it was the likeliest."""
        longest = max(map(len, answers))
        if not longest:
            return [((), ())] * len(answers)
        # Padded on the right, where no earlier token sees it.
        target_BT = torch.tensor([[*answer, *[0] * (longest - len(answer))] for answer in answers])
        target_BT = target_BT.to(ids_BS.device)
        if self.shares:
            read_BT = torch.cat([unread_BT, target_BT[:, :-1]], 1)
            logits_BTV, _ = self.forward(read_BT, cache, longest)
            cache.crop(-longest)
        else:
            logits_BTV = self._stepped(ids_BS, target_BT)
        wide = finite(logits_BTV)
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        loss_BT = -wide.log_softmax(-1).gather(2, target_BT[..., None])[..., 0]
        right_BT = wide.argmax(-1) == target_BT
        scored = zip(loss_BT.tolist(), right_BT.tolist(), map(len, answers), strict=True)
        return [(tuple(loss[:size]), tuple(right[:size])) for loss, right, size in scored]

    def _stepped(self, ids_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Logits before each target, read one by one: each at the length that the text then has."""
        reset_dynamic_rope(self.model)
        logits_B1V, cache = self.forward(ids_BS, None)
        steps = [logits_B1V]
        for token_B in target_BT[:, :-1].unbind(1):
            logits_B1V, cache = self.forward(token_B[:, None], cache)
            steps.append(logits_B1V)
        return torch.cat(steps, 1)

    def _greedy(self, ids_BS: Tensor, cache: Any, new_tokens: int) -> list[Ids]:
        """Tokens by transformers' `generate`, up to an end."""
        if not new_tokens:
            return [()] * len(ids_BS)
        reset_dynamic_rope(self.model)
        config = GenerationConfig(
            max_new_tokens=new_tokens, eos_token_id=self._ends or None, pad_token_id=0
        )
        # transformers takes what a call leaves out from the model, and reminds of trained lengths.
        plainly = patch.object(self.model, "generation_config", GenerationConfig())
        with plainly, hushed("transformers.generation.stopping_criteria"):
            written = self.model.generate(
                ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                generation_config=config,
                logits_processor=LogitsProcessorList([finite]),
                **({} if cache is None else {CACHE: cache}),
            )[:, ids_BS.shape[1] :].tolist()
        return [tuple(takewhile(lambda token: token not in self._ends, row)) for row in written]


def _common(rows: Sequence[Ids]) -> Ids:
    """The longest start of all rows: that of the first and the last of them in order."""
    pairs = zip(min(rows), max(rows), strict=False)
    return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _keeps_all(model: Any) -> bool:
    """True if every layer keeps the keys of all tokens, in the plain form that can be cut."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = cache_of(model(input_ids=token, use_cache=True))
    if cache is None:
        raise ClearheadError(f"{type(model).__name__} has no key-value cache to read answers with")
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def follow_length(model: Any) -> bool:
    """True if a longer text is read with other frequencies from its first token on."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    kinds = [one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def reset_dynamic_rope(model: Any) -> None:
    """Make transformers drop the frequencies of the longest text so far, by reading a short one."""
    if follow_length(model) and not isinstance(model.config, ClearheadConfig):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
