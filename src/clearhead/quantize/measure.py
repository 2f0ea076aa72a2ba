"""Cost of a scheme: perplexity with it, beside that of full precision.

`QuantizationTask` is a task of a sweep: a cell for full precision, and one for each scheme.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from clearhead.data import windows
from clearhead.errors import ClearheadError
from clearhead.eval import perplexity
from clearhead.eval.options import LISTED
from clearhead.eval.sliding import Perplexity
from clearhead.measure.sweep import Cell, Subject
from clearhead.quantize import attention, linear
from clearhead.quantize.schemes import Scheme
from clearhead.records.cells import errors, on_perplexity
from clearhead.records.runs import Line


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts on which models are measured.

    Attributes:
        windows: int64 [length] each, for perplexity.
        calibration: int64 [length] each, of other text, for the scales of `fine` and `static`.
    """

    windows: Sequence[Tensor]
    calibration: Sequence[Tensor] = ()


@dataclass(frozen=True, kw_only=True)
class Cost(Perplexity):
    """The perplexity under a scheme, or in full precision; or the reason why there is none.

    Attributes:
        unused: quantised layers that no token passed through, such as unchosen experts.
    """

    unused: tuple[str, ...] = ()


class Called(NamedTuple):
    """The names of the modules that ran so far on quantised tensors.

    Attributes:
        layers: linear layers, on quantised inputs.
        attention: on quantised logits, keys or values.
    """

    layers: set[str]
    attention: set[str]


@contextmanager
def quantized(model: Any, scheme: Scheme, texts: Texts | None = None) -> Iterator[Called]:
    """Run the body with the model under a scheme; its weights are the same tensors afterwards.

    Raises:
        ClearheadError: what `linear` and `attention` refuse; a calibrated scheme without texts.
    """
    layers, called, tops = linear.linear_layers(model), Called(set(), set()), None
    if scheme.calibrated:
        windows = () if texts is None else texts.calibration
        tops = linear.calibrated(model, layers, windows, scheme.rotated)
    with ExitStack() as stack:
        if scheme.activations is not None or scheme.rotated:
            inputs = linear.inputs(layers, scheme.activations, tops, scheme.rotated)
            called = called._replace(layers=stack.enter_context(inputs))
        if scheme.weights is not None:
            stack.enter_context(linear.weights(layers, scheme.weights, scheme.rotated))
        if scheme.attends:
            rounded = attention.attention(model, scheme.logits, scheme.keys_values)
            called = called._replace(attention=stack.enter_context(rounded))
        yield called


def cost(model: Any, scheme: Scheme | None, texts: Texts) -> Cost:
    """Measure one scheme, or full precision where it is None.

    Windows are run one at a time: a tensor's dynamic scale would otherwise depend on the rest of
    the batch. A scheme that the model cannot run gives a result with a reason.

    Raises:
        ClearheadError: texts that do not fit the model.
    """
    if scheme is None:
        return _measured(model, texts)
    try:
        with quantized(model, scheme, texts) as called:
            cost = _measured(model, texts)
    except ClearheadError as error:
        return Cost(reason=str(error))
    if scheme.attends and not called.attention:  # accepted the name, never asked for it
        return Cost(reason=attention.without_interface(model))
    layers = () if scheme.activations is None else linear.linear_layers(model)
    return replace(cost, unused=tuple(one for one in layers if one not in called.layers))


def _measured(model: Any, texts: Texts) -> Cost:
    measured = perplexity(model, texts.windows, length=len(texts.windows[0]), batch_size=1)
    return Cost(**{**vars(measured), **({"loss": None} if measured.reason else {})})


@dataclass(frozen=True, kw_only=True)
class QuantizationTask:
    """Perplexity under each scheme, on windows of `length` tokens."""

    schemes: tuple[Scheme, ...] = field(metadata=LISTED)
    length: int
    drawn: ClassVar[bool] = True

    def cells(self, subject: Subject) -> list[Cell]:
        linear.linear_layers(subject.model)  # refuses what is quantised already
        self.texts(subject)  # refuses what is too short
        return [{}, *({"scheme": one.name} for one in self.schemes)]

    def measure(self, subject: Subject, cell: Cell) -> Iterable[Line]:
        scheme = next((one for one in self.schemes if one.name == cell.get("scheme")), None)
        measured = cost(subject.model, scheme, self.texts(subject))
        if scheme is None and measured.reason:
            raise ClearheadError(f"in full precision: {measured.reason}")
        family = {} if scheme is None else {"family": scheme.family, "bits": scheme.bits}
        details = {**family, "predicted_tokens": measured.tokens, "unused": list(measured.unused)}
        if measured.perplexity is None or measured.loss is None:
            return [{"metric": "perplexity", "value": None, "reason": measured.reason, **details}]
        value = measured.perplexity
        items = on_perplexity(value, measured.loss, measured.by_window)
        found = errors("perplexity", value, items)
        return [{"metric": "perplexity", "value": value, **found, **details}]

    def texts(self, subject: Subject) -> Texts:
        """Windows of the validation split and, where a scheme is calibrated, of the training split
        for its scales."""
        cut = partial(windows, subject.texts.corpus, length=self.length)
        held_out = cut(count=max(1, subject.tokens // self.length), seed=subject.seed)
        calibrated = any(one.calibrated for one in self.schemes)
        calibration = cut(split="train", count=linear.CALIBRATION) if calibrated else ()
        return Texts(windows=list(held_out), calibration=list(calibration))
