"""Advice where a measure of the diagnosis reaches a threshold, which it states."""

from typing import Any


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
    lines = [
        line
        for line in measures
        if not {"head", "position"} & line.keys()
        and line["value"] is not None
        and line["value"] == line["value"]
    ]
    whole = {
        (line["metric"], line.get("map"), line.get("tokens")): line["value"]
        for line in lines
        if "layer" not in line
    }
    by_layer = sorted((x for x in lines if "layer" in x), key=lambda line: line["layer"])
    last = {line["metric"]: line["value"] for line in by_layer}

    def get(metric: str, map: str | None = None, tokens: str | None = None) -> float | None:
        return whole.get((metric, map, tokens))

    # Of any map: where maps are combined, the main one has no null key of its own.
    nulls = any(line["metric"] in ("null_mass", "prefix_mass") for line in lines)
    largest_rank = width if length is None else min(width, length - 1)
    sink, beyond = _sink(whole), _near(last, get("near_weight_chance"))
    # Metric, number, threshold (at most it where the metric is in `_BELOW`), finding, advice.
    rules: tuple[tuple[str, float | None, float, str, str], ...] = (
        (
            "non_finite_tokens",
            get("non_finite_tokens"),
            1,
            "{:,.0f} hidden states are not finite",
            "no other number of this diagnosis counts them: look for the first layer that "
            "has any, and run in a wider dtype",
        ),
        (
            "first_token_argmax_share",
            None if nulls else sink,
            0.3,
            "the first token is a sink: {:.0%} of all queries attend to it most",
            "keep it in a sliding cache; to train without: softmax-1 (preset softmax1), which "
            "arXiv 2410.17174 reports at 3.3 % from 65 %",
        ),
        (
            "first_token_argmax_share",
            sink if nulls else None,
            0.3,
            "the first token is a sink beside the null key: {:.0%} of all queries attend "
            "to it most",
            "keep it in a sliding cache: this model does not put all idle weight on no key "
            "(null_mass, or prefix_mass of learned keys, says how much)",
        ),
        (
            "hidden_top_1 / hidden_median",
            _quotient(get("hidden_top_1"), get("hidden_median")),
            1000,
            "massive activations: the largest hidden state is {:,.0f} × the median",
            "one scale for a whole tensor of activations will round the others to nothing: "
            "quantise by token or channel, or weights only; to train without: OrthoAdam with a "
            "norm of one gain",
        ),
        (
            "kurtosis",
            get("kurtosis", tokens="rest"),
            30,
            "outlier channels beyond the first token: kurtosis {:,.1f} (3 is a Gaussian)",
            "expect 8-bit activations by tensor to cost perplexity: measure it with "
            "clearhead quantize before relying on them",
        ),
        (
            "logit_top_1 / logit_median",
            _quotient(get("logit_top_1"), get("logit_median")),
            50,
            "attention logits spread: the largest is {:,.0f} × the median",
            "low-bit attention logits will hurt (arXiv 2410.05258, Table 5: 59 × in a "
            "Transformer that drops at 6 bits, 12 × in a differential one that holds)",
        ),
        (
            "order_broken_content",
            get("order_broken_content"),
            0.6,  # a half, if angles are as they come
            "the order anomaly: moved nearer, {:.0%} of sampled keys score lower",
            "expect trouble beyond the training length; to train without: collinear attention "
            "(preset coca)",
        ),
        (
            "similarity",
            last.get("similarity"),
            0.9,
            "tokens are alike after the last layer: mean cosine {:.2f}",
            "signals do not propagate: fewer layers would do, or attention needs its skip or "
            "the shaped form",
        ),
        (
            "effective_rank_without_first / largest",
            _quotient(last.get("effective_rank_without_first"), largest_rank),
            0.02,
            "rank collapse: the last layer's effective rank is {:.1%} of the largest possible",
            "signals do not propagate: see token similarity by layer for where it starts",
        ),
        (
            "near_weight_beyond / near_weight_trained",
            beyond,
            0.5,
            "beyond the training length the last layer gives near keys {:.0%} of the "
            "weight that it gave them within",
            "scale the rotary positions (clearhead.models.with_rope_scaling, or "
            "rope_parameters) before longer texts",
        ),
    )
    return [
        {
            "finding": finding.format(value),
            "advice": advice,
            "metric": metric,
            "value": value,
            "threshold": threshold,
        }
        for metric, value, threshold, finding, advice in rules
        if value is not None and (value <= threshold if metric in _BELOW else value >= threshold)
    ]


_BELOW = ("effective_rank_without_first / largest", "near_weight_beyond / near_weight_trained")


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _sink(whole: dict[tuple[str, Any, Any], float]) -> float | None:
    """The argmax share, where it is at least five times what no preference would give."""
    shares = (
        whole.get(("first_token_argmax_share", map, None)) for map in ("softmax", "difference")
    )
    share = next((one for one in shares if one is not None), None)
    floor = whole.get(("chance_floor", None, None))
    return share if share is not None and floor and share >= 5 * floor else None


def _near(last: dict[str, float], chance: float | None) -> float | None:
    """The last layer's weight on near keys beyond the training length, to that within it; where
    within it they had at least twice what equal weights give."""
    within = last.get("near_weight_trained")
    if within is None or chance is None or within < 2 * chance:
        return None
    return _quotient(last.get("near_weight_beyond"), within)
