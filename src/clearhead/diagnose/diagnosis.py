"""A model's whole diagnosis, in one pass over the text and one long text; a task of a sweep."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from clearhead.data import windows
from clearhead.diagnose.advice import advise
from clearhead.diagnose.attention_profile import (
    ClosedGates,
    NullMass,
    Reach,
    RowMeans,
    SignedDifference,
    SinkRate,
)
from clearhead.diagnose.extrapolation import extrapolate
from clearhead.diagnose.hidden import HiddenStatistics, ResidualStream
from clearhead.diagnose.logits import LogitSizes, NearestKeys
from clearhead.diagnose.order import RotaryOrder
from clearhead.diagnose.reparametrised import gain_ratios
from clearhead.diagnose.spectrum import Spectrum
from clearhead.errors import ClearheadError
from clearhead.measure.task import Advanced, Cell, Subject
from clearhead.models.inspection import batches, evaluating, lack_of_positions, run_backbone
from clearhead.probe.observation import AttentionStatistic, LayerStatistic, observe
from clearhead.probe.statistic import curves_of, measures_of
from clearhead.probe.tiles import TILE, ByTile
from clearhead.records.runs import Line

LONGEST_EXTRAPOLATION = 8192  # tokens that are run unasked


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Payloads of records; each field is named after its "kind" of record, in the plural.

    Attributes:
        measures: {"metric", "value"} and the dimensions "map", "layer", "head", "tokens",
            "position".
        curves: {"curve", "x", "y"} and "map", "layer".
        channels: outlier channels.
        notes: {"part", "reason"} of what could not be measured.
        advice: {"finding", "advice", "metric", "value", "threshold"}.
    """

    measures: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    channels: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    advice: list[dict[str, Any]] = field(default_factory=list)

    def records(self) -> Iterator[dict[str, Any]]:
        """All payloads, each with its "kind"."""
        for name, lines in vars(self).items():
            for line in lines:
                yield {"kind": name.removesuffix("s"), **line}


_OF_ATTENTION = "attention, order, extrapolation"


def diagnose(
    model: Any,
    windows: Iterable[Tensor],
    *,
    batch_size: int,
    progress: Callable[[], None] | None = None,
) -> Diagnosis:
    """Attention, hidden states, order and rank of any model of transformers, over windows of text.

    Its mode and its attention implementation are left as they were, and while it is observed its
    own kernels compute its outputs. Where its attention cannot be observed, a note says why and
    the rest is measured.

    Args:
        model: a causal language model, or an encoder, with a list of layers.
        windows: int64 [T] each, text from position 0 on, all of one length, at least 2.
        batch_size: windows run together; it changes speed and memory, not the results.
        progress: called after every batch.

    Raises:
        ClearheadError: windows or a model that this cannot be measured on.
    """
    windows = list(windows)
    length = max(map(len, windows), default=0)
    stream, order = ResidualStream(), RotaryOrder(model, length)
    hidden: list[LayerStatistic] = [HiddenStatistics(), stream]
    gates = ClosedGates()
    tiles = ByTile(
        weights=[RowMeans(), NullMass(), SinkRate(), SignedDifference(), Reach()],
        scores=[LogitSizes(), NearestKeys()],
    )
    attention: list[AttentionStatistic] = [tiles, order, Spectrum()]
    notes: list[dict[str, Any]] = []
    with evaluating(model), ExitStack() as stack:
        stack.enter_context(observe(model, hidden=hidden, gates=[gates]))
        try:
            stack.enter_context(observe(model, attention=attention))
        except ClearheadError as error:
            notes.append({"part": _OF_ATTENTION, "reason": str(error)})
        for ids_BT in batches(model, windows, batch_size):
            if length < 2:
                raise ClearheadError("windows have 1 token: give at least 2")
            run_backbone(model, ids_BT)
            if progress is not None:
                progress()
    of_attention = measures_of(attention)
    if not of_attention and not notes:
        reason = f"{type(model).__name__} has no attention in its layers that could be observed"
        notes.append({"part": _OF_ATTENTION, "reason": reason})
    if (unknown := order.why_not()) is not None:
        notes.append({"part": "order of rotary positions", "reason": unknown})
    measures = measures_of(hidden) + of_attention + gates.measures() + gain_ratios(model)
    return Diagnosis(
        measures=measures,
        curves=curves_of(attention),
        channels=stream.outliers(),
        notes=notes,
        advice=advise(measures, width=_width(model), length=length),
    )


def with_extrapolation(
    diagnosis: Diagnosis,
    model: Any,
    text: Callable[[int], Tensor],
    *,
    trained: int | None,
    factor: float,
) -> Diagnosis:
    """Add the measures of one text of `factor` training lengths, or a note why there are none.

    Args:
        text: a function of a length to int64 [length].
        trained: tokens; None is the configuration's max_position_embeddings.
        factor: above 1.
    """
    part = "extrapolation"
    if any(part in note["part"] for note in diagnosis.notes):
        return diagnosis
    stated = trained or getattr(model.config, "max_position_embeddings", None)
    ids, reason = None, "the configuration names no training length: give --trained-length"
    if isinstance(stated, int) and stated >= 2:
        length = math.ceil(factor * stated)
        reason = lack_of_positions(model, length)
        if not reason and length > LONGEST_EXTRAPOLATION and trained is None:
            reason = (
                f"{factor:g} × the {stated:,} positions of the configuration are {length:,} "
                "tokens: give --trained-length with what the model was really trained on"
            )
        if not reason:
            try:
                ids = text(length)
            except ClearheadError as error:
                reason = str(error)
    if ids is None or stated is None:
        return replace(diagnosis, notes=[*diagnosis.notes, {"part": part, "reason": reason}])
    longer = extrapolate(model, ids, stated)
    measures = longer.measures()
    return replace(
        diagnosis,
        measures=diagnosis.measures + measures,
        curves=diagnosis.curves + longer.curves(),
        advice=diagnosis.advice + advise(measures, width=_width(model)),
    )


def _width(model: Any) -> int:
    return int(getattr(model.config, "hidden_size", 0))


def bytes_held(model: Any, batch_size: int, length: int) -> int:
    """Estimate from the shapes the bytes that the probes hold at most beside the forward pass.

    Three tiles of scores (eight for shaped attention), one layer's queries and keys in float32,
    five copies of one layer's hidden states, and two Gram matrices in float64; nothing grows with
    the text read.
    """
    config = model.config
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    width = _width(model)
    tile = max(TILE, batch_size * heads * length)
    side = min(length, width)
    tiles = 3 if getattr(config, "shaping", "none") == "none" else 8
    return 4 * (tiles * tile + 7 * batch_size * length * width) + 16 * side * side


LESS_MEMORY = "give a smaller --length (window) or --batch-tokens"


@dataclass(frozen=True, kw_only=True)
class DiagnosisTask:
    """All that is measured of one model on windows of text, and on one longer text: one cell.

    Attributes:
        length: tokens in a window. windows: their number, at most. at: where they start.
        extrapolate: length of the longer text, in training lengths; 1 for none.
        trained_length: the training length, where the configuration's is another.
    """

    length: int
    windows: int
    at: Literal["anywhere", "documents"]
    extrapolate: float
    trained_length: int | None
    drawn: ClassVar[bool] = True

    def cells(self, subject: Subject) -> list[Cell]:
        self._texts(subject)
        return [{}]

    def measure(self, subject: Subject, cell: Cell, advanced: Advanced) -> Iterable[Line]:
        size = max(1, subject.batch_tokens // self.length)
        texts, corpus, seed = list(self._texts(subject)), subject.texts.corpus, subject.seed
        found = diagnose(subject.model, texts, batch_size=size, progress=lambda: advanced(size))
        if self.extrapolate > 1:
            found = with_extrapolation(
                found,
                subject.model,
                lambda tokens: next(iter(windows(corpus, length=tokens, count=1, seed=seed))),
                trained=self.trained_length,
                factor=self.extrapolate,
            )
        return found.records()

    def number(self, subject: Subject) -> int:
        """The number of windows to measure: those requested, as far as the text has them."""
        return sum(1 for _ in self._texts(subject))

    def _texts(self, subject: Subject) -> Iterable[Tensor]:
        return windows(
            subject.texts.corpus,
            length=self.length,
            count=self.windows,
            at=self.at,
            seed=subject.seed,
        )
