"""Advice where a measure of the diagnosis reaches a threshold, which it states."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Found = Mapping[tuple[str, Any, Any, Any], float]
_LARGEST_RANK = "largest_rank"  # beside the measures


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Advice given where `number` is at least `threshold` (at most, with `below`)."""

    metric: str
    number: Callable[[Found], float | None]
    threshold: float
    finding: str
    advice: str
    below: bool = False


def advise(
    measures: list[dict[str, Any]], *, width: int, length: int | None = None
) -> list[dict[str, Any]]:
    """{"finding", "advice", "metric", "value", "threshold"} of each rule whose number reaches its
    threshold.

    Args:
        width: the model's, in channels.
        length: of the texts, in tokens: a rank is at most that of the tokens after the first. None
            for texts at least as long as the model is wide.
    """
    measured = {
        (line["metric"], line.get("map"), line.get("tokens"), line.get("layer")): line["value"]
        for line in measures
        if not {"head", "position"} & line.keys()
        and line["value"] is not None
        and line["value"] == line["value"]
    }
    largest = width if length is None else min(width, length - 1)
    measured[_LARGEST_RANK, None, None, None] = largest
    values = ((rule, rule.number(measured)) for rule in _RULES)
    return [
        {
            "finding": rule.finding.format(value=value),
            "advice": rule.advice,
            "metric": rule.metric,
            "value": value,
            "threshold": rule.threshold,
        }
        for rule, value in values
        if value is not None
        and (value <= rule.threshold if rule.below else value >= rule.threshold)  # never of NaN
    ]


def _get(found: Found, metric: str, map: str | None = None, tokens: str | None = None) -> Any:
    return found.get((metric, map, tokens, None))


def _sink(*, beside_a_null_key: bool) -> Callable[[Found], float | None]:
    """The argmax share, where it is at least five times what no preference would give, in models
    that can put weight beside the text's own keys or in those that cannot."""

    def number(found: Found) -> float | None:
        # Of any map: where maps are combined, the main one has no null key of its own.
        nulls = any(metric in ("null_mass", "prefix_mass") for metric, *_ in found)
        if nulls != beside_a_null_key:
            return None
        shares = (_get(found, "first_token_argmax_share", map) for map in ("softmax", "difference"))
        share = next((one for one in shares if one is not None), None)
        floor = _get(found, "chance_floor")
        return share if share is not None and floor and share >= 5 * floor else None

    return number


def _quotient(above: str, below: str) -> Callable[[Found], float | None]:
    def number(found: Found) -> float | None:
        a, b = _get(found, above), _get(found, below)
        return None if a is None or not b else a / b

    return number


def _last(metric: str) -> Callable[[Found], float | None]:
    def number(found: Found) -> float | None:
        layers = {key[3]: v for key, v in found.items() if key[0] == metric and key[3] is not None}
        return layers[max(layers)] if layers else None

    return number


def _rank(found: Found) -> float | None:
    """The last layer's effective rank, to the largest that its texts and its width allow."""
    rank = _last("effective_rank_without_first")(found)
    largest = _get(found, _LARGEST_RANK)
    return rank / largest if rank is not None and largest else None


def _near(found: Found) -> float | None:
    """The last layer's weight on near keys beyond the training length, to that within it; where
    within it they had at least twice what equal weights give."""
    chance = _get(found, "near_weight_chance")
    beyond, within = (_last(f"near_weight_{name}")(found) for name in ("beyond", "trained"))
    if beyond is None or within is None or chance is None or within < 2 * chance:
        return None
    return beyond / within


_RULES = (
    _Rule(
        metric="non_finite_tokens",
        number=lambda found: _get(found, "non_finite_tokens"),
        threshold=1,
        finding="{value:,.0f} hidden states are not finite",
        advice="no other number of this diagnosis counts them: look for the first layer that "
        "has any, and run in a wider dtype",
    ),
    _Rule(
        metric="first_token_argmax_share",
        number=_sink(beside_a_null_key=False),
        threshold=0.3,
        finding="the first token is a sink: {value:.0%} of all queries attend to it most",
        advice="keep it in a sliding cache; to train without: softmax-1 (preset softmax1), which "
        "arXiv 2410.17174 reports at 3.3 % from 65 %",
    ),
    _Rule(
        metric="first_token_argmax_share",
        number=_sink(beside_a_null_key=True),
        threshold=0.3,
        finding="the first token is a sink beside the null key: {value:.0%} of all queries attend "
        "to it most",
        advice="keep it in a sliding cache: this model does not put all idle weight on no key "
        "(null_mass, or prefix_mass of learned keys, says how much)",
    ),
    _Rule(
        metric="hidden_top_1 / hidden_median",
        number=_quotient("hidden_top_1", "hidden_median"),
        threshold=1000,
        finding="massive activations: the largest hidden state is {value:,.0f} × the median",
        advice="one scale for a whole tensor of activations will round the others to nothing: "
        "quantise by token or channel, or weights only; to train without: OrthoAdam with a norm "
        "of one gain",
    ),
    _Rule(
        metric="kurtosis",
        number=lambda found: _get(found, "kurtosis", tokens="rest"),
        threshold=30,
        finding="outlier channels beyond the first token: kurtosis {value:,.1f} (3 is a Gaussian)",
        advice="expect 8-bit activations by tensor to cost perplexity: measure it with "
        "clearhead quantize before relying on them",
    ),
    _Rule(
        metric="logit_top_1 / logit_median",
        number=_quotient("logit_top_1", "logit_median"),
        threshold=50,
        finding="attention logits spread: the largest is {value:,.0f} × the median",
        advice="low-bit attention logits will hurt (arXiv 2410.05258, Table 5: 59 × in a "
        "Transformer that drops at 6 bits, 12 × in a differential one that holds)",
    ),
    _Rule(
        metric="order_broken_content",
        number=lambda found: _get(found, "order_broken_content"),
        threshold=0.6,  # a half, if angles are as they come
        finding="the order anomaly: moved nearer, {value:.0%} of sampled keys score lower",
        advice="expect trouble beyond the training length; to train without: collinear attention "
        "(preset coca)",
    ),
    _Rule(
        metric="similarity",
        number=_last("similarity"),
        threshold=0.9,
        finding="tokens are alike after the last layer: mean cosine {value:.2f}",
        advice="signals do not propagate: fewer layers would do, or attention needs its skip or "
        "the shaped form",
    ),
    _Rule(
        metric="effective_rank_without_first / largest",
        number=_rank,
        threshold=0.02,
        finding="rank collapse: the last layer's effective rank is {value:.1%} of the largest "
        "possible",
        advice="signals do not propagate: see token similarity by layer for where it starts",
        below=True,
    ),
    _Rule(
        metric="near_weight_beyond / near_weight_trained",
        number=_near,
        threshold=0.5,
        finding="beyond the training length the last layer gives near keys {value:.0%} of the "
        "weight that it gave them within",
        advice="scale the rotary positions (clearhead.models.with_rope_scaling, or "
        "rope_parameters) before longer texts",
        below=True,
    ),
)
