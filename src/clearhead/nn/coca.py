"""CoCA, collinear constrained attention (arXiv 2309.08646): scores in three forms."""

from functools import partial

from clearhead import ops
from clearhead.nn.bases import Weights, numbers_per_group
from clearhead.ops.coca import Form
from clearhead.spec import Declaration, LayerSpec


class Collinear:
    """CoCA: q̃ and k̃ from the rotary tables. Keys are cached as t, unrotated."""

    cache_unrotated = True

    def __init__(self, form: Form) -> None:
        self.queries = partial(ops.coca_queries, form=form)
        self.keys = partial(ops.coca_keys, form=form)
        self.attend_unrotated = partial(ops.attend_unrotated, form=form)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.position not in ("rope", "xpos"):
        return f"position={layer.position!r} rotates nothing: choose rope or xpos"
    if layer.query_range == 0:
        return "quadratic in the queries, it has no gradient at query_range=0: leave that out"
    return None


def _halved(
    weights: Weights, before: LayerSpec, after: LayerSpec, *, projections: tuple[str, ...]
) -> Weights:
    """The mean of each rotated pair of channels: another function, from trained weights."""
    halved = dict(weights)
    for name in weights:
        if name.startswith(projections):
            pairs = weights[name].unflatten(0, (-1, 2, after.head_dim // 2))
            halved[name] = pairs.mean(1).flatten(0, 1)
    return halved


def _half(layer: LayerSpec) -> int:
    return layer.head_dim // 2


def _coca(form: Form, name: str, summary: str, source: str) -> Declaration:
    halved = ("q_proj.", "k_proj.") if form == "strict" else ("k_proj.",)
    return Declaration(
        *("scores", name, summary, source),
        lambda layer, prepare: Collinear(form),
        refuses=_refuses,
        query_width=_half if form == "strict" else lambda layer: layer.head_dim,
        key_width=_half,
        flops=lambda layer, length: 3.0 * layer.head_dim * layer.num_attention_heads,
        cache=lambda layer: numbers_per_group(layer) // 2,
        adopt=partial(_halved, projections=halved),
    )


DECLARATIONS = (
    _coca(
        "exact",
        "coca",
        "CoCA as the paper defines it: Σ t_j |q_j|² cos((m−n)θ_j) / √d",
        "arXiv 2309.08646, eqs. 9 and 17",
    ),
    _coca(
        "strict", "coca-strict", "CoCA with both halves of q equal", "arXiv 2309.08646, CoCA-Strict"
    ),
    _coca(
        "slack",
        "coca-slack",
        "CoCA as the authors trained it: (q ∘ R_m q) · R_n [t; t] / √d, not a function of distance",
        "arXiv 2309.08646, CoCA-Slack (eq. 10)",
    ),
)
