"""One layer's attention: queries, keys, and tiles of scores; R is the rows of a tile."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.nn.attention import Attention
from clearhead.nn.bases import AsSoftmax
from clearhead.ops.sinks import as_null
from clearhead.ops.visibility import Span, Visibility

# A tile holds at most so many rows a head and so many weights in all (16 MiB in float32), whatever
# the batch and the length; the few copies that statistics make of it bound a probe's memory.
ROWS = 128
WEIGHTS = 1 << 22


class Scores(NamedTuple):
    """Rows `start` to `start + R` of the logits [B, H, R, S], float32 at least and undefined where
    hidden; `visible` is bool [B or 1, H or 1, R, S], and every row sees the first `clear` keys."""

    start: int
    scores: Tensor
    visible: Tensor
    clear: int


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The inputs of one layer's attention.

    Attributes:
        module: the attention module.
        layer: the index of its decoder layer.
        q: queries [B, H, T, D], rotated.
        k: keys [B, G, S, D], rotated.
        v: values [B, V, S, D], of as many heads as keys or more; None where they are not observed.
        prefix: learned keys and values before the text's, [B or 1, V, N, D] each.
        scale: factor of the products q · k.
        visibility: the keys that each query sees, apart from `mask`.
        sink: an extra logit of every row, a number, [H] or [B, H, T].
        sink_value: the sink's value vector for each query, [B, H, T, V]; None for zero.
        mask: [B or 1, H or 1, T, S]: bool, True where visible, or added to the scores.
        bias: added to the scores, [B or 1, H, T, S].
        softcap: scores are c · tanh(score / c).
        lambdas: λ of clearhead's own maps, [..., T or 1, 1] or a scalar.
        as_softmax: of the layer's `Normalizer`.
    """

    module: nn.Module
    layer: int
    q: Tensor
    k: Tensor
    scale: float
    visibility: Visibility = Visibility()  # noqa: RUF009 (a frozen value)
    sink: float | Tensor | None = None
    sink_value: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    lambdas: Tensor | None = None
    v: Tensor | None = None
    prefix: tuple[Tensor, Tensor] | None = None
    as_softmax: AsSoftmax | None = None

    @property
    def causal(self) -> bool:
        """No query sees a key after its own."""
        return self.visibility.causal

    @property
    def before(self) -> int:
        """Cached keys before the first query's own."""
        return self.k.shape[2] - self.q.shape[2] if self.causal else 0

    @property
    def null_metric(self) -> str:
        """Name of the weight beside the keys: `prefix_mass` where learned keys have values."""
        return "null_mass" if self.sink_value is None else "prefix_mass"

    def null_logit(self, start: int = 0, rows: int | None = None) -> float | Tensor | None:
        """The sink as `normalised` takes it, of some of the queries."""
        if not isinstance(self.sink, Tensor) or not self.sink.ndim:
            return self.sink
        if self.sink.ndim == 1:
            return self.sink[:, None, None]
        return self.sink[:, :, start:][:, :, :rows, None]

    def competing(
        self, score_BHRS: Tensor, visible: Tensor, start: int
    ) -> tuple[Tensor, float | Tensor | None]:
        """Scores, hidden ones left as they are, and the sink's logit that `normalised` takes."""
        if self.as_softmax is None:
            return score_BHRS, self.null_logit(start, score_BHRS.shape[2])
        return self.as_softmax(score_BHRS, visible)

    def scores(self, size: int | None = None) -> Iterator[Scores]:
        """The logits, in float32 at least, by tiles of at most `size` numbers, or of `WEIGHTS`."""
        batch, heads, queries, _ = self.q.shape
        keys = self.k.shape[2]
        wide = torch.promote_types(self.q.dtype, torch.float32)
        k = self.k.to(wide).repeat_interleave(heads // self.k.shape[1], dim=1)
        rows = max(1, min(ROWS, (size or WEIGHTS) // (batch * heads * keys)))
        limited = self.visibility.settled(queries, keys)
        masked = limited.masked or limited.window is not None or self.mask is not None
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            end = keys - queries + stop if self.causal else keys
            # The queries scaled rather than the scores: a pass less over the larger.
            score = self.q[:, :, start:stop].to(wide) * self.scale @ k[:, :, :end].mT
            if self.softcap is not None:
                score = self.softcap * torch.tanh(score / self.softcap)
            for added in (self.bias, self.mask):
                if added is not None and added.dtype != torch.bool:
                    score = score + added[:, :, start:stop, :end]
            clear = 0 if masked else keys - queries + start + 1 if self.causal else keys
            visible = torch.ones(1, 1, stop - start, end, dtype=torch.bool, device=k.device)
            hidden = self.visibility.hidden(Span(start, stop, 0, end), queries, keys, k.device)
            if hidden is not None:
                visible = visible & ~hidden
            if self.mask is not None:
                visible = visible & shown(self.mask[:, :, start:stop, :end])
            yield Scores(start, score, visible, clear)


def described(
    module: nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> AttentionCall:
    """The AttentionCall for the arguments of a function of transformers' AttentionInterface."""
    scaling = options.get("scaling")
    common: dict[str, Any] = {"module": module, "layer": layer, "q": query, "k": key, "v": value}
    common["scale"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(module, Attention):
        own = {name: options[name] for name in ("visibility", "sink", "lambdas", "prefix")}
        if own["prefix"] is not None:
            own["sink"], own["sink_value"] = as_null(
                query, own["prefix"], own["sink"], common["scale"]
            )
        return AttentionCall(**common, **own, as_softmax=module.as_softmax)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return AttentionCall(
        **common,
        visibility=Visibility(causal=bool(causal) and mask is None and query.shape[2] > 1),
        sink=options.get("s_aux"),
        mask=mask,
        bias=options.get("position_bias"),
        softcap=options.get("softcap"),
    )


def shown(mask: Tensor) -> Tensor:
    """True where a mask leaves a key visible: models hide by False, the lowest number or −inf."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def normalised(score_BHRS: Tensor, sink: float | Tensor | None) -> tuple[Tensor, Tensor | None]:
    """exp(s) / (exp(sink) + Σ exp(s)), and exp(sink) over the same; rows that see no key are 0."""
    top = score_BHRS.amax(-1, keepdim=True)
    if sink is None:
        weight = torch.exp(score_BHRS - top.nan_to_num(neginf=0.0))
        total = weight.sum(-1, keepdim=True)
        return weight / torch.where(total == 0, 1.0, total), None
    logit = torch.as_tensor(sink, dtype=top.dtype, device=top.device)
    top = torch.maximum(top, logit)
    weight, null = torch.exp(score_BHRS - top), torch.exp(logit - top)
    total = weight.sum(-1, keepdim=True) + null
    return weight / total, (null / total).squeeze(-1)
