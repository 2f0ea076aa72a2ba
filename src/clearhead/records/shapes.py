"""Types of the values in lines of records, checked as they are loaded: pages trust them.

Keys that are not named here are only ever shown as text.
"""

from typing import Annotated, Any, TypedDict

from clearhead.ranges import Natural, Range, check_keys

Whole = Annotated[int, Range("a whole number")]
Number = Annotated[float, Range("a finite number")]


class _Tokenizer(TypedDict, total=False):
    vocabulary: Natural | None


class _Data(TypedDict, total=False):
    tokenizer: _Tokenizer | None


class _Model(TypedDict, total=False):
    vocab_size: Natural


class _Train(TypedDict, total=False):
    sequence_length: Natural | None
    tokens: Natural | None


class _Header(TypedDict, total=False):
    arm: str
    preset: str
    label: str
    size: str
    seed: Whole
    device: str | None
    parameters: Natural
    non_embedding_parameters: Natural
    trainable_parameters: Natural
    quantized_parameters: Natural
    length: Natural
    tokens: Natural
    questions: Natural | None
    chance: Number | None
    left_out: dict[str, Natural] | None
    changes: dict[str, Any] | None
    data: _Data | None
    model: _Model
    train: _Train | None
    peak_memory_bytes: Natural | None
    probes_hold_bytes: Natural | None


class _Dimensions(TypedDict, total=False):
    task: str | None
    scaling: str | None
    factor: Number | None
    length: Natural | None
    longest: Natural | None
    depth: Number | None
    needles: Natural | None
    queries: Natural | None
    pairs: Natural | None
    data: str | None
    file: str | None
    judge: str | None
    version: str | None
    shots: int | str | None
    order: str | None
    document: str | None
    scheme: str | None
    split: str | None
    map: str | None
    layer: Whole | None
    head: Natural | None
    tokens: str | None
    step: Natural | None


class _Details(TypedDict, total=False):
    draw: Whole
    stderr: Number | None
    family: str | None
    bits: Natural | None
    reason: str | None
    unused: tuple[str, ...] | None


class _Measure(_Dimensions, _Details):
    pass


class _Step(TypedDict, total=False):
    step: Natural
    loss: Number | None
    tokens: Natural | None
    seconds: Number | None
    learning_rate: Number | None
    gradient_norm: Number | None
    tokens_per_second: Number | None


class _Made(TypedDict, total=False):
    dtype: str
    seed: Whole
    batch_tokens: Natural
    seconds: Number
    peak_memory_bytes: Natural


class _Cell(TypedDict):
    task: str
    at: _Dimensions
    options: dict[str, Any]
    made: _Made


class _Counted(_Cell, total=False):
    headlines: tuple[str, ...]
    lines: Natural


class _Curve(TypedDict):
    curve: str
    x: tuple[Number | str, ...]
    y: tuple[Number | None, ...]


class _LayersCurve(_Curve, total=False):
    layer: Whole
    map: str
    draw: Whole


class _Attention(TypedDict):
    layer: Natural
    head: Natural
    map: str
    text: tuple[str, ...]
    weights: tuple[tuple[Number | None, ...], ...]


class _Channel(TypedDict):
    channel: Natural
    layer: Whole
    first_layer: Whole
    largest: Number
    medians: Number
    of: Natural
    tokens: str


class _Advice(TypedDict):
    advice: str
    finding: str
    metric: str
    value: Number
    threshold: Number


class _Note(TypedDict):
    part: str
    reason: str


_SHAPES = {
    "run": _Header,
    "diagnosis": _Header,
    "quantization": _Header,
    "measure": _Measure,
    "scheme": _Details,
    "step": _Step,
    "cell": _Counted,
    "curve": _LayersCurve,
    "attention": _Attention,
    "channel": _Channel,
    "advice": _Advice,
    "note": _Note,
}


def check_line(line: dict[str, Any]) -> None:
    """Refuse a line of a known kind whose values have other types.

    Raises:
        ClearheadError: naming the key, what was found and what it should be.
    """
    check_keys(line, _SHAPES[line["kind"]])
