"""A model under several schemes, as records."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from clearhead.data import Corpus, windows
from clearhead.errors import ClearheadError
from clearhead.models.inspection import within_memory
from clearhead.quantize import Cost, Scheme, Texts, cost, left_out, linear_layers
from clearhead.quantize.measure import CALIBRATION
from clearhead.records.provenance import provenance
from clearhead.records.runs import QUANTIZATION


def texts(corpus: Corpus, *, length: int, tokens: int, schemes: Sequence[Scheme]) -> Texts:
    """Windows of the validation split for perplexity and, where a scheme is calibrated, of the
    training split for its scales.

    Raises:
        ClearheadError: a split is shorter than a window.
    """
    calibrated = any(s.activations and s.activations.scale == "channel" for s in schemes)
    calibration: list[torch.Tensor] = []
    if calibrated:
        calibration = list(windows(corpus, split="train", length=length, count=CALIBRATION))
    read = windows(corpus, length=length, count=max(1, tokens // length))
    return Texts(windows=list(read), calibration=calibration)


def measured(
    model: Any,
    read: Texts,
    schemes: Sequence[Scheme],
    *,
    name: str,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The results in full precision and under each scheme, as lines of measures.

    Raises:
        ClearheadError: the model is quantised already or has no linear layers, its perplexity in
            full precision cannot be measured, or memory ran out.
    """
    linear_layers(model)  # refuses before anything is run
    with within_memory(f"give a smaller --length than {len(read.windows[0])}"):
        full = cost(model, None, read)
        if full.perplexity is None:
            raise ClearheadError(f"{name} in full precision: {full.reason}")
        progress(f"{name}: full precision, perplexity {full.perplexity:.4g}")
        yield from _lines(name, full, full)
        for scheme in schemes:
            found = cost(model, scheme, read)
            none = found.perplexity is None
            value = f"none: {found.reason}" if none else f"perplexity {found.perplexity:.4g}"
            progress(f"{name}: {scheme.name}, {value}")
            yield from _lines(name, found, full)


def header(model: Any, read: Texts, *, name: str, path: str, **described: Any) -> dict[str, Any]:
    """The run's header: what was measured, on what, with what."""
    layers = linear_layers(model)
    weights = {id(p): p for layer in layers.values() for p in (layer.get_parameter("weight"),)}
    calibration = f"{len(read.calibration)} windows of the training split"
    return {
        "kind": "run",
        "study": QUANTIZATION,
        "run": name,
        "path": path,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "quantized_parameters": sum(weight.numel() for weight in weights.values()),
        "left_out": left_out(model, layers),
        "length": len(read.windows[0]),
        "tokens": sum(map(len, read.windows)),
        "calibration": calibration if read.calibration else None,
        **provenance(model.device),
        **described,
    }


def distinct(paths: Sequence[str]) -> list[str]:
    """A name for each model: the run's folder rather than its "final", the whole path where two
    would be called alike."""
    short = [_short(Path(path)) for path in paths]
    return [
        name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)
    ]


def _short(path: Path) -> str:
    return path.parent.name if path.name == "final" and path.parent.name else path.name


def _lines(name: str, found: Cost, full: Cost) -> Iterator[dict[str, Any]]:
    """The measures of a scheme; without one, of full precision."""
    scheme = found.scheme
    where: dict[str, Any] = {"kind": "measure", "run": name}
    if scheme is not None:
        where |= {"scheme": scheme.name, "family": scheme.family, "bits": scheme.bits}
    asked = {"questions": found.questions, "chance": found.chance}
    unused = list(found.unused)
    yield {
        **where,
        "metric": "perplexity",
        "value": found.perplexity,
        "predicted_tokens": found.tokens,
        "unused": unused,
        **asked,
        **({} if found.reason is None else {"reason": found.reason}),
    }
    if scheme is not None and found.perplexity is not None and full.perplexity is not None:
        yield {
            **where,
            "metric": "added_perplexity",
            "value": found.perplexity - full.perplexity,
        }
    for metric in ("accuracy", "accuracy_normalised"):
        if (value := getattr(found, metric)) is not None:
            yield {**where, "metric": metric, "value": value, **asked}
