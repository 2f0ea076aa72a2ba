"""Types of the values in lines of records, checked as they are loaded: pages trust them.

Keys that are not named here are only ever shown as text.
"""

from typing import Annotated, Any

from clearhead.ranges import Natural, Range, Shape, check_keys

Whole = Annotated[int, Range("a whole number")]
Number = Annotated[float, Range("a finite number")]


def _each(kind: Any, names: str) -> Shape:
    return dict.fromkeys(names.split(), kind)


_HEADER: Shape = {
    **_each(str, "arm preset label size"),
    **_each(str | None, "device"),
    **_each(Whole, "seed"),
    **_each(Natural, "parameters non_embedding_parameters trainable_parameters"),
    **_each(Natural, "quantized_parameters length tokens"),
    **_each(Natural | None, "peak_memory_bytes probes_hold_bytes"),
    "left_out": dict[str, Natural] | None,
    "changes": dict[str, Any] | None,
    "data": {"tokenizer": {"vocabulary": Natural | None}},
    "model": {"vocab_size": Natural},
    "train": _each(Natural | None, "sequence_length tokens"),
}
_DIMENSIONS: Shape = {
    **_each(str | None, "task scaling data file judge version order document scheme split map"),
    **_each(str | None, "tokens"),
    **_each(Number | None, "factor depth"),
    **_each(Natural | None, "length longest needles queries pairs head position step"),
    **_each(Whole | None, "layer"),
    **_each(int | str | None, "shots"),
}
_DETAILS: Shape = {
    "draw": Whole,
    "stderr": Number | None,
    **_each(str | None, "family reason"),
    "bits": Natural | None,
    "unused": tuple[str, ...] | None,
}
_STEP: Shape = {
    "step": Natural,
    "tokens": Natural | None,
    **_each(Number | None, "loss seconds learning_rate gradient_norm tokens_per_second"),
}
_MADE: Shape = {
    "dtype": str,
    "seed": Whole,
    "seconds": Number,
    **_each(Natural, "batch_tokens peak_memory_bytes"),
}
# Kind of line → (what it has, and what it may have besides).
_SHAPES: dict[str, tuple[Shape, Shape]] = {
    "run": ({}, _HEADER),
    "measure": ({}, {**_DIMENSIONS, **_DETAILS}),
    "step": ({}, _STEP),
    "cell": (
        {
            **_each(str, "cell task"),
            "at": _DIMENSIONS,
            "lines": Natural,
        },
        {"options": dict[str, Any], "made": _MADE},
    ),
    "curve": (
        {"curve": str, "x": tuple[Number | str, ...], "y": tuple[Number | None, ...]},
        {"layer": Whole, "map": str, "draw": Whole},
    ),
    "attention": (
        {
            **_each(Natural, "layer head"),
            "map": str,
            "text": tuple[str, ...],
            "weights": tuple[tuple[Number | None, ...], ...],
        },
        {},
    ),
    "channel": (
        {
            **_each(Natural, "channel of"),
            **_each(Whole, "layer first_layer"),
            **_each(Number, "largest medians"),
            "tokens": str,
        },
        {},
    ),
    "advice": ({**_each(str, "advice finding metric"), **_each(Number, "value threshold")}, {}),
    "note": (_each(str, "part reason"), {}),
}


def check_line(line: dict[str, Any]) -> None:
    """Refuse a line of a known kind whose values have other types.

    Raises:
        ClearheadError: naming the key, what was found and what it should be.
        ValueError: a curve or a map whose sides do not fit.
    """
    needed, others = _SHAPES[line["kind"]]
    check_keys(line, {**needed, **others}, needed)
    if line["kind"] == "curve" and len(line["x"]) != len(line["y"]):
        raise ValueError(f"{len(line['x'])} x and {len(line['y'])} y")
    if line["kind"] == "attention":
        size = len(line["text"])
        if {len(line["weights"]), *map(len, line["weights"])} - {size}:
            raise ValueError(f"the weights are not {size} × {size}, one for each pair of tokens")
