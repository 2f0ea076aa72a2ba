"""A model's whole diagnosis, in one pass over the text and one long text."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clearhead.diagnose.advice import advise
from clearhead.diagnose.extrapolation import extrapolate
from clearhead.diagnose.interface import probing
from clearhead.diagnose.order import OrderProfile
from clearhead.diagnose.profile import TILE, AttentionProfile
from clearhead.diagnose.spectrum import SpectrumProfile
from clearhead.diagnose.stream import stream_profile
from clearhead.diagnose.weights import AttentionCall
from clearhead.errors import ClearheadError
from clearhead.models.inspection import (
    batches,
    evaluating,
    longest_text,
    run_backbone,
    within_memory,
)

LONGEST_EXTRAPOLATION = 8192  # tokens that are run unasked


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, as payloads of records.

    Attributes:
        measures: {"metric", "value"} and the dimensions "map", "layer", "head", "tokens".
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
        """All of it, each with its "kind"."""
        for kind in ("measure", "curve", "channel", "note", "advice"):
            for line in getattr(self, _FIELDS[kind]):
                yield {"kind": kind, **line}


_FIELDS = {
    "measure": "measures",
    "curve": "curves",
    "channel": "channels",
    "note": "notes",
    "advice": "advice",
}


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
        ClearheadError: windows or a model that this cannot be measured on, or too little memory.
    """
    attention, spectrum = AttentionProfile(), SpectrumProfile()
    notes: list[dict[str, Any]] = []
    order: OrderProfile | None = None

    def observe(call: AttentionCall) -> None:
        attention.observe(call)
        spectrum.observe(call)
        if order is not None:
            order.observe(call)

    with within_memory(LESS_MEMORY), evaluating(model), ExitStack() as stack:
        stream = stack.enter_context(stream_profile(model))
        try:
            stack.enter_context(probing(model, observe))
        except ClearheadError as error:
            notes.append({"part": "attention, order, extrapolation", "reason": str(error)})
        for ids_BT in batches(model, windows, batch_size):
            if ids_BT.shape[1] < 2:
                raise ClearheadError("windows have 1 token: give at least 2")
            if order is None:
                order = OrderProfile(model, ids_BT.shape[1])
            run_backbone(model, ids_BT)
            if progress is not None:
                progress()
    assert order is not None
    seen = bool(attention.layers())
    if not seen and not notes:
        reason = f"{type(model).__name__} has no attention in its layers that could be observed"
        notes.append({"part": "attention, order, extrapolation", "reason": reason})
    if (unknown := order.why_not()) is not None:
        notes.append({"part": "order of rotary positions", "reason": unknown})
    measures = stream.measures()
    curves: list[dict[str, Any]] = []
    if seen:
        for profile in (attention, order, spectrum):
            measures += profile.measures()
            curves += profile.curves()
    return Diagnosis(
        measures=measures,
        curves=curves,
        channels=stream.outliers(),
        notes=notes,
        advice=advise(measures, width=_width(model)),
    )


def with_extrapolation(
    found: Diagnosis,
    model: Any,
    text: Callable[[int], Tensor],
    *,
    trained: int | None,
    factor: float,
) -> Diagnosis:
    """Add what one text of `factor` training lengths shows.

    Args:
        text: a function of a length to int64 [length].
        trained: tokens; None is the configuration's max_position_embeddings.
        factor: above 1.
    """
    part = "extrapolation"
    if any(part in note["part"] for note in found.notes):
        return found
    given = trained is not None
    trained = trained or getattr(model.config, "max_position_embeddings", None)

    def without(reason: str) -> Diagnosis:
        return _with(found, notes=[{"part": part, "reason": reason}])

    if not isinstance(trained, int) or trained < 2:
        return without("the configuration names no training length: give --trained-length")
    length = math.ceil(factor * trained)
    limit = longest_text(model)
    if limit is not None and length > limit:
        return without(f"the model has {limit:,} learned positions, too few for {length:,} tokens")
    if length > LONGEST_EXTRAPOLATION and not given:
        return without(
            f"{factor:g} × the {trained:,} positions of the configuration are {length:,} tokens: "
            "give --trained-length with what the model was really trained on"
        )
    try:
        ids = text(length)
    except ClearheadError as error:
        return without(str(error))
    with within_memory(LESS_MEMORY):
        longer = extrapolate(model, ids, trained)
    measures = longer.measures()
    return _with(
        found,
        measures=measures,
        curves=longer.curves(),
        advice=advise(measures, width=_width(model)),
    )


def _with(found: Diagnosis, **more: list[dict[str, Any]]) -> Diagnosis:
    parts = {name: getattr(found, name) + more.get(name, []) for name in _FIELDS.values()}
    return Diagnosis(**parts)


def _width(model: Any) -> int:
    return int(getattr(model.config, "hidden_size", 0))


def bytes_held(model: Any, batch_size: int, length: int) -> int:
    """What the probes hold at most beside the forward pass, in bytes: an estimate from the shapes.

    Three tiles of scores, one layer's queries and keys in float32, five copies of one layer's
    hidden states, and two Gram matrices in float64; nothing grows with the text read.
    """
    config = model.config
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    width = _width(model)
    tile = max(TILE, batch_size * heads * length)
    side = min(length, width)
    return 4 * (3 * tile + 7 * batch_size * length * width) + 16 * side * side


LESS_MEMORY = "give a smaller --length (window) or --batch-tokens; nothing was written"
