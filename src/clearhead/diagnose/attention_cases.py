"""Ways of running a few texts through a model: alone, padded, packed, through a cache.

A correct model gives every text the same logits, and their loss the same gradients, in each way.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from clearhead.models.base_model import CACHE, cache_of

# Lengths of the texts: odd, and each longer than the window.
LENGTHS, WINDOW = (23, 17, 9), 6
HIGH = 20.0  # a logit at which a dropped sink changes everything


class Answer(NamedTuple):
    """Float64 logits [ΣT, V], and gradients by parameter of the mean cross-entropy, if taken."""

    logits: Tensor
    gradients: dict[str, Tensor]


class Texts:
    """A few random texts, and the ways of running a model on them, which return the logits of all
    tokens, [ΣT, V], text after text."""

    def __init__(self, model: Any, lengths: Sequence[int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        known = model.get_input_embeddings().num_embeddings
        limit = getattr(model.config, "max_position_embeddings", None) or max(lengths)
        drawn = (torch.randint(1, known, (min(n, limit),), generator=draw) for n in lengths)
        self.ids = [ids.to(model.device) for ids in drawn]
        self.lengths = [*map(len, self.ids)]
        self.causal = "ForMaskedLM" not in type(model).__name__
        # Of a causal model the next token; of an encoder each token itself.
        ahead = int(self.causal)
        self.labels = torch.cat(
            [torch.cat([ids[ahead:], ids.new_full((ahead,), -100)]) for ids in self.ids]
        )

    def logits(self, model: Any, ids_BT: Tensor, **options: Any) -> Tensor:
        """[B, T, V], without a cache."""
        cached = {"use_cache": False} if self.causal else {}
        logits: Tensor = model(input_ids=ids_BT, **cached, **options).logits
        return logits

    def alone(self, model: Any) -> Tensor:
        return torch.cat([self.logits(model, ids[None])[0] for ids in self.ids])

    def compiled(self, model: Any) -> Tensor:
        torch.compiler.reset()
        return self.alone(torch.compile(model))

    def padded(self, model: Any) -> Tensor:
        """In one batch; for a causal model all but the second are padded on the left."""
        longest = max(self.lengths)
        ids_BT = self.ids[0].new_zeros(len(self.ids), longest)
        mask_BT = torch.zeros_like(ids_BT)
        for row, ids in enumerate(self.ids):
            first = longest - len(ids) if self.causal and row != 1 else 0
            ids_BT[row, first : first + len(ids)], mask_BT[row, first : first + len(ids)] = ids, 1
        options: dict[str, Any] = {"attention_mask": mask_BT}
        if self.causal:
            options["position_ids"] = (mask_BT.cumsum(1) - 1).clamp(min=0)
        return self.logits(model, ids_BT, **options)[mask_BT.bool()]

    def packed(self, model: Any) -> Tensor:
        """In one row, separated by positions that restart."""
        positions = torch.cat([torch.arange(n, device=self.labels.device) for n in self.lengths])
        return self.logits(model, torch.cat(self.ids)[None], position_ids=positions[None])[0]

    @torch.no_grad()
    def stepwise(self, model: Any) -> Tensor:
        """Token by token through a cache, after half of a text at once; no gradients."""
        return self._cached(model, lambda length: [length // 2, *[1] * length])

    def in_chunks(self, model: Any) -> Tensor:
        """In three chunks through a cache, so that there are fewer queries than keys."""
        return self._cached(model, lambda length: [4, 3, length])

    def _cached(self, model: Any, sizes: Callable[[int], list[int]]) -> Tensor:
        logits = []
        for ids in self.ids:
            options: dict[str, Any] = {}
            for size in sizes(len(ids)):
                chunk, ids = ids[:size], ids[size:]
                if len(chunk):
                    out = model(input_ids=chunk[None], use_cache=True, **options)
                    options = {CACHE: cache_of(out)}
                    logits.append(out.logits[0])
        return torch.cat(logits)

    def answer(self, model: Any, run: Callable[["Texts", Any], Tensor]) -> Answer:
        """The logits of the texts, run in one way, and the gradients of their loss."""
        logits = run(self, model).double()
        loss = cross_entropy(logits, self.labels)
        gradients: dict[str, Tensor] = {}
        if loss.requires_grad:
            named = {name: one for name, one in model.named_parameters() if one.requires_grad}
            grads = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
            zipped = zip(named, grads, strict=True)
            gradients = {name: grad.double() for name, grad in zipped if grad is not None}
        return Answer(logits.detach(), gradients)


class Way(NamedTuple):
    """A way of running the texts, the logit of every sink (None: low ones), and the window."""

    run: Callable[[Texts, Any], Tensor] = Texts.alone
    sink: float | None = None
    window: int | None = None
    causal: bool = False  # of causal models alone


WAYS = {
    "plain": Way(),
    "sinks of 20": Way(sink=HIGH),
    "padded": Way(Texts.padded),
    "packed": Way(Texts.packed, causal=True),
    "cached": Way(Texts.stepwise, causal=True),
    "chunks": Way(Texts.in_chunks, causal=True),
    "windowed": Way(window=WINDOW),
    "windowed, cached": Way(Texts.stepwise, window=WINDOW, causal=True),
    "compiled": Way(Texts.compiled),
}
