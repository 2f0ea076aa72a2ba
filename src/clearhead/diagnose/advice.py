"""Advice where a measure of the diagnosis reaches a threshold, which it states."""

from typing import Any

LOST, SINK = "non_finite_tokens", "first_token_argmax_share"
_RANK = "effective_rank_without_first / largest"  # advice where it is at most its threshold
# Metric: threshold, finding, advice.
_RULES: dict[str, tuple[float, str, str]] = {
    LOST: (
        1,
        "{:,.0f} hidden states are not finite",
        "no other number of this diagnosis counts them: look for the first layer that has any, and "
        "run in a wider dtype",
    ),
    SINK: (
        0.3,
        "the first token is a sink: {:.0%} of all queries attend to it most",
        "keep it in a sliding cache; to train without: softmax-1 (preset softmax1), which "
        "arXiv 2410.17174 reports at 3.3 % from 65 %",
    ),
    "hidden_top_1 / hidden_median": (
        1000,
        "massive activations: the largest hidden state is {:,.0f} × the median",
        "one scale for a whole tensor of activations will round the others to nothing: quantise by "
        "token or channel, or weights only; to train without: OrthoAdam with a norm of one gain",
    ),
    "kurtosis": (
        30,
        "outlier channels beyond the first token: kurtosis {:,.1f} (3 is a Gaussian)",
        "expect 8-bit activations by tensor to cost perplexity: measure it with clearhead quantize "
        "before relying on them",
    ),
    "logit_top_1 / logit_median": (
        50,
        "attention logits spread: the largest is {:,.0f} × the median",
        "low-bit attention logits will hurt (arXiv 2410.05258, Table 5: 59 × in a Transformer that "
        "drops at 6 bits, 12 × in a differential one that holds)",
    ),
    "order_broken_content": (
        0.6,  # a half, if angles are as they come
        "the order anomaly: moved nearer, {:.0%} of sampled keys score lower",
        "expect trouble beyond the training length; to train without: collinear attention (preset "
        "coca)",
    ),
    "similarity": (
        0.9,
        "tokens are alike after the last layer: mean cosine {:.2f}",
        "signals do not propagate: fewer layers would do, or attention needs its skip or the "
        "shaped form",
    ),
    _RANK: (
        0.02,
        "rank collapse: the last layer's effective rank is {:.1%} of the largest possible",
        "signals do not propagate: see token similarity by layer for where it starts",
    ),
}
_BESIDE_A_NULL_KEY: dict[str, tuple[float, str, str]] = {
    SINK: (
        0.3,
        "the first token is a sink beside the null key: {:.0%} of all queries attend to it most",
        "keep it in a sliding cache: this model does not put all idle weight on no key (null_mass, "
        "or prefix_mass of learned keys, says how much)",
    )
}


def advise(measures: list[dict[str, Any]], *, width: int, length: int) -> list[dict[str, Any]]:
    """Findings: {"finding", "advice", "metric", "value", "threshold"} of each rule whose number
    reaches its threshold.

    Args:
        width: the model's, in channels.
        length: of the texts, in tokens: a rank is at most that of the tokens after the first.
    """
    whole, last = dict[tuple[str, Any], float](), dict[str, float]()
    for line in sorted(measures, key=lambda line: line.get("layer", -1)):
        value = line["value"]
        if {"head", "position"} & line.keys() or value is None or value != value:
            continue
        if "layer" in line:
            last[line["metric"]] = value
        else:
            whole[line["metric"], line.get("map") or line.get("tokens")] = value

    def over(above: str, below: str) -> float | None:
        return _quotient(whole.get((above, None)), whole.get((below, None)))

    # Of any map: where maps are combined, the main one has no null key of its own.
    nulls = any(line["metric"] in ("null_mass", "prefix_mass") for line in measures)
    sink = _sink(whole)
    rank = _quotient(last.get("effective_rank_without_first"), min(width, length - 1))
    values = {
        LOST: whole.get((LOST, None)),
        SINK: sink,
        "hidden_top_1 / hidden_median": over("hidden_top_1", "hidden_median"),
        "kurtosis": whole.get(("kurtosis", "rest")),
        "logit_top_1 / logit_median": over("logit_top_1", "logit_median"),
        "order_broken_content": whole.get(("order_broken_content", None)),
        "similarity": last.get("similarity"),
        _RANK: rank,
    }
    findings = []
    for metric, (threshold, finding, advice) in (
        _RULES | (_BESIDE_A_NULL_KEY if nulls else {})
    ).items():
        value = values[metric]
        if value is None or (value > threshold if metric == _RANK else value < threshold):
            continue
        line = {"finding": finding.format(value), "advice": advice, "metric": metric}
        findings.append({**line, "value": value, "threshold": threshold})
    return findings


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _sink(whole: dict[tuple[str, Any], float]) -> float | None:
    """The argmax share, if at least five times that of attention without preference."""
    shares = (whole.get(("first_token_argmax_share", map)) for map in ("softmax", "difference"))
    share = next((one for one in shares if one is not None), None)
    floor = whole.get(("chance_floor", None))
    return share if share is not None and floor and share >= 5 * floor else None
