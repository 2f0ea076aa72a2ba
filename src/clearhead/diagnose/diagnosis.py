"""A model's whole diagnosis, in one pass over the text; a task of a sweep."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Literal

from torch import Tensor

from clearhead.data import windows
from clearhead.diagnose import attention_profile as profile
from clearhead.diagnose.hidden import HiddenStatistics, ResidualStream
from clearhead.diagnose.order import RotaryOrder
from clearhead.errors import ClearheadError
from clearhead.measure.sweep import Cell, Subject
from clearhead.models.inspection import batches, decoder_layers, evaluating, run_backbone
from clearhead.nn.attention import Attention
from clearhead.nn.values import Reparametrised
from clearhead.probe.observation import Statistic, measures_of, observe
from clearhead.probe.tiles import ByTile
from clearhead.records.runs import Line

LESS_MEMORY = "give a smaller --length (window) or --batch-tokens"
_OF_ATTENTION = "attention, order"
OF_VALUES, OF_PROJECTIONS = "beta_over_alpha_values", "beta_over_alpha_projections"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Payloads of records, in fields named after their "kind", in the plural; `notes` are on parts
    that could not be measured."""

    measures: list[dict[str, Any]] = field(default_factory=list)
    channels: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    advice: list[dict[str, Any]] = field(default_factory=list)

    def records(self) -> Iterator[dict[str, Any]]:
        """All payloads, each with its "kind"."""
        for name, lines in vars(self).items():
            for line in lines:
                yield {"kind": name.removesuffix("s"), **line}


def diagnose(model: Any, windows: Iterable[Tensor], *, batch_size: int) -> Diagnosis:
    """Attention, hidden states, order and rank of any model of transformers, over windows of text.

    Where its attention cannot be observed, a note says why and the rest is measured.

    Args:
        model: a causal language model, or an encoder, with a list of layers.
        windows: int64 [T] each, text from position 0 on, all of one length, at least 2.
        batch_size: windows run together; it changes speed and memory, not the results.

    Raises:
        ClearheadError: windows or a model on which this cannot be measured.
    """
    windows = list(windows)
    length = max(map(len, windows), default=0)
    stream, order, gates = ResidualStream(), RotaryOrder(model), profile.ClosedGates()
    hidden: list[Statistic] = [HiddenStatistics(), stream]
    tiles = ByTile(
        weights=[profile.RowMeans(), profile.NullMass(), profile.Lambdas()],
        scores=[profile.LogitSizes()],
    )
    attention: list[Statistic] = [tiles, order, profile.KeyValueSizes()]
    notes: list[dict[str, Any]] = []
    with evaluating(model), ExitStack() as stack:
        stack.enter_context(observe(model, hidden=hidden, gates=[gates]))
        try:
            stack.enter_context(observe(model, attention=attention))
        except ClearheadError as error:
            notes.append({"part": _OF_ATTENTION, "reason": str(error)})
        for ids_BT in batches(model, windows, batch_size):
            run_backbone(model, ids_BT)
    of_attention = measures_of(attention)
    if not of_attention and not notes:
        reason = f"{type(model).__name__} has no attention in its layers that could be observed"
        notes.append({"part": _OF_ATTENTION, "reason": reason})
    if (unknown := order.why_not()) is not None:
        notes.append({"part": "order of rotary positions", "reason": unknown})
    measures = measures_of(hidden) + of_attention + gates.measures() + gain_ratios(model)
    width = int(getattr(model.config, "hidden_size", 0))
    advice = advise(measures, width=width, length=length)
    return Diagnosis(measures=measures, channels=stream.outliers(), notes=notes, advice=advice)


def gain_ratios(model: Any) -> list[dict[str, Any]]:
    """|β/α| of W = α W_init + β ΔW (arXiv 2311.01906, figures 4, 22): of values and projections by
    layer, and the mean of all but the first layer's values, the paper's exception."""
    lines: list[dict[str, Any]] = [
        {"metric": metric, "layer": n, "value": (one.beta.double() / one.alpha).abs().item()}
        for n, layer in enumerate(decoder_layers(model))
        for module in layer.modules()
        if isinstance(module, Attention)
        for metric, one in ((OF_VALUES, module.v_proj), (OF_PROJECTIONS, module.o_proj))
        if isinstance(one, Reparametrised)
    ]
    others = [one["value"] for one in lines if (one["metric"], one["layer"]) != (OF_VALUES, 0)]
    whole = [{"metric": "beta_over_alpha", "value": fmean(others)}] if others else []
    return whole + lines


# Advice where a measure of the diagnosis reaches a threshold, which it states.
LOST, SINK = "non_finite_tokens", "first_token_argmax_share"
_RANK = "effective_rank_without_first / largest"  # advice where it is at most its threshold
# Metric: threshold, finding, advice.
_RULES: dict[str, tuple[float, str, str]] = {
    LOST: (
        1,
        "{:,.0f} hidden states are not finite",
        "no other number counts them: look for the first layer with any; run in a wider dtype",
    ),
    SINK: (
        0.3,
        "the first token is a sink: {:.0%} of all queries attend to it most",
        "keep it in a sliding cache; to train without: preset softmax1 (arXiv 2410.17174)",
    ),
    "hidden_top_1 / hidden_median": (
        1000,
        "massive activations: the largest hidden state is {:,.0f} × the median",
        "one scale for a whole tensor of activations rounds others to nothing: take one a token or "
        "channel; to train without: OrthoAdam with a norm of one gain",
    ),
    "kurtosis": (
        30,
        "outlier channels beyond the first token: kurtosis {:,.1f} (3 is a Gaussian)",
        "expect 8-bit activations by tensor to cost perplexity: measure it (clearhead quantize)",
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
        "expect trouble beyond the training length; to train without: preset coca (collinear)",
    ),
    "similarity": (
        0.9,
        "tokens are alike after the last layer: mean cosine {:.2f}",
        "signals do not propagate: take fewer layers, a skip of attention, or the shaped form",
    ),
    _RANK: (
        0.02,
        "rank collapse: the last layer's effective rank is {:.1%} of the largest possible",
        "signals do not propagate: see token similarity by layer for where it starts",
    ),
}
_BESIDE_A_NULL_KEY = (
    0.3,
    "the first token is a sink beside the null key: {:.0%} of all queries attend to it most",
    "keep it in a sliding cache: null_mass, or prefix_mass, is not all of the idle weight",
)


def advise(measures: list[dict[str, Any]], *, width: int, length: int) -> list[dict[str, Any]]:
    """Findings of each rule whose metric reaches its threshold. `width`, the model's channels, and
    `length`, the tokens of a text, bound the effective rank."""
    whole, last = dict[tuple[str, Any], float](), dict[str, float]()
    for line in sorted(measures, key=lambda line: line.get("layer", -1)):
        value = line["value"]
        if {"head", "position"} & line.keys() or value is None or value != value:
            continue
        if "layer" in line:
            last[line["metric"]] = value
        else:
            whole[line["metric"], line.get("map") or line.get("tokens")] = value
    values = {metric: whole.get((metric, None)) for metric in _RULES}
    for part in ("hidden", "logit"):
        top, median = (whole.get((f"{part}_{one}", None)) for one in ("top_1", "median"))
        values[f"{part}_top_1 / {part}_median"] = _quotient(top, median)
    # The argmax share, if at least five times that of attention without preference.
    sink = whole.get((SINK, "softmax"), whole.get((SINK, "difference"), 0.0))
    floor = whole.get(("chance_floor", None))
    values[SINK] = sink if floor and sink >= 5 * floor else None
    values["kurtosis"] = whole.get(("kurtosis", "rest"))
    values["similarity"] = last.get("similarity")
    rank = last.get("effective_rank_without_first")
    values[_RANK] = _quotient(rank, min(width, length - 1))
    # Of any map: where maps are combined, the main one has no null key of its own.
    nulls = any(line["metric"] in ("null_mass", "prefix_mass") for line in measures)
    rules = _RULES | ({SINK: _BESIDE_A_NULL_KEY} if nulls else {})
    findings = []
    for metric, (threshold, finding, advice) in rules.items():
        value = values[metric]
        if value is None or (value > threshold if metric == _RANK else value < threshold):
            continue
        line = {"finding": finding.format(value), "advice": advice, "metric": metric}
        findings.append({**line, "value": value, "threshold": threshold})
    return findings


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


@dataclass(frozen=True, kw_only=True)
class DiagnosisTask:
    """The diagnosis of one model on at most `windows` windows of `length` tokens: one cell
    (a task of `measure.sweep`)."""

    length: int
    windows: int
    at: Literal["anywhere", "documents"]
    drawn: ClassVar[bool] = True

    def cells(self, subject: Subject) -> list[Cell]:
        self.texts(subject)
        return [{}]

    def measure(self, subject: Subject, cell: Cell) -> Iterable[Line]:
        size = max(1, subject.batch_tokens // self.length)
        return diagnose(subject.model, self.texts(subject), batch_size=size).records()

    def texts(self, subject: Subject) -> list[Tensor]:
        """The windows to measure: those requested, as far as the text has them."""
        where: Any = {"length": self.length, "at": self.at, "seed": subject.seed}
        return list(windows(subject.texts.corpus, count=self.windows, **where))
