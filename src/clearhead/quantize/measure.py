"""Cost of a scheme: perplexity with it, beside that of full precision."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from clearhead.data import windows
from clearhead.errors import ClearheadError
from clearhead.eval.sliding import Perplexity, perplexity
from clearhead.measure.sweep import Cell, Subject
from clearhead.ops.hadamard import rotate_channels
from clearhead.quantize import attention, linear
from clearhead.quantize.schemes import Scheme
from clearhead.records.cells import errors, on_perplexity
from clearhead.records.runs import Line
from clearhead.settings.eval import LISTED


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Windows for perplexity, int64 [length] each, and those of other text on which the scales of
    `fine` and `static` are calibrated."""

    windows: Sequence[Tensor]
    calibration: Sequence[Tensor] = ()


class Called(NamedTuple):
    """Names of the linear layers, and of the attention modules, that ran quantised so far."""

    layers: set[str]
    attention: set[str]


@contextmanager
def quantized(model: Any, scheme: Scheme, texts: Texts | None = None) -> Iterator[Called]:
    """Run the body with the model under a scheme; its weights are the same tensors afterwards.

    Yields the names of the linear layers, and of the attention modules, that ran quantised so far.

    Raises:
        ClearheadError: as `linear_layers`; attention that cannot be observed; a calibrated scheme
            without texts.
    """
    layers, called = linear.linear_layers(model), Called(set(), set())
    how, tops = scheme.activations, dict[str, Tensor]()
    if scheme.calibrated:
        calibration = () if texts is None else texts.calibration
        tops = linear.calibrated(model, layers, calibration, scheme.rotated)

    def rounded(name: str, x: Tensor) -> Tensor:
        called.layers.add(name)
        x = rotate_channels(x) if scheme.rotated else x
        if how is None:
            return x
        top = tops.get(name)
        top = top.amax() if top is not None and how.scale == "static" else top
        with linear.naming(f"the input of {name}"):
            return linear.quantise_rows(x.flatten(0, -2), how, top).view(x.shape)

    with ExitStack() as stack:
        if how is not None or scheme.rotated:
            stack.enter_context(linear.hooked(layers, rounded))
        if scheme.weights is not None:
            stack.enter_context(linear.weights(layers, scheme.weights, scheme.rotated))
        if scheme.attends:
            attended = attention.attention(model, scheme.logits, scheme.keys_values)
            called = called._replace(attention=stack.enter_context(attended))
        yield called


def cost(model: Any, scheme: Scheme | None, texts: Texts) -> Perplexity:
    """Perplexity, and loss in nats a token, under a scheme, or in full precision where it is None.

    Windows are run one at a time: a tensor's dynamic scale would otherwise depend on the rest of
    the batch. A scheme that the model cannot run gives a `reason` and no numbers. `unused` are
    quantised layers that no token passed through, such as unchosen experts. In full precision,
    texts that do not fit the model are a ClearheadError.
    """
    try:
        with ExitStack() as stack:
            if scheme is not None:
                called = stack.enter_context(quantized(model, scheme, texts))
            measured = perplexity(model, texts.windows, batch_size=1)
    except ClearheadError as error:
        if scheme is None:
            raise
        return Perplexity(reason=str(error))
    measured = replace(measured, loss=None) if measured.reason else measured
    if scheme is None:
        return measured
    if scheme.attends and not called.attention:  # accepted the name, never asked for it
        return Perplexity(reason=attention.without_interface(model))
    layers = () if scheme.activations is None else linear.linear_layers(model)
    return replace(measured, unused=tuple(one for one in layers if one not in called.layers))


@dataclass(frozen=True, kw_only=True)
class QuantizationTask:
    """Perplexity on windows of `length` tokens: a cell in full precision, and one for each scheme
    (a task of `measure.sweep`)."""

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
        line: Line = {} if scheme is None else {"family": scheme.family, "bits": scheme.bits}
        line |= {"predicted_tokens": measured.tokens, "unused": list(measured.unused)}
        value = measured.perplexity
        if value is None or measured.loss is None:
            return [{"metric": "perplexity", "value": None, "reason": measured.reason, **line}]
        items = on_perplexity(value, measured.loss, measured.by_window)
        interval = errors("perplexity", value, items)
        return [{"metric": "perplexity", "value": value, **interval, **line}]

    def texts(self, subject: Subject) -> Texts:
        """Windows of the validation split and, where a scheme is calibrated, of the training split
        for its scales."""
        cut = partial(windows, subject.texts.corpus, length=self.length)
        held_out = cut(count=max(1, subject.tokens // self.length), seed=subject.seed)
        calibrated = any(one.calibrated for one in self.schemes)
        calibration = cut(split="train", count=linear.CALIBRATION) if calibrated else ()
        return Texts(windows=list(held_out), calibration=list(calibration))
