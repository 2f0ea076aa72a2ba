"""One model and a text to the records of its diagnosis."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from clearhead.data import Corpus, windows
from clearhead.diagnose import diagnose, with_extrapolation
from clearhead.diagnose.diagnosis import bytes_held
from clearhead.experiments.configs import DiagnoseConfig
from clearhead.models.inspection import longest_text
from clearhead.records.runs import DIAGNOSIS
from clearhead.train.folder import describe
from clearhead.train.memory import PeakMemory

LENGTH = 512


def diagnosis_records(
    name: str,
    model: Any,
    corpus: Corpus,
    config: DiagnoseConfig,
    progress: Callable[[int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of one model: its header, then all that was found.

    Args:
        progress: called with the number of windows after each batch.

    Raises:
        ClearheadError: as `clearhead.diagnose.diagnose`, or where the text holds no window.
    """
    made_for = (
        longest_text(model) or getattr(model.config, "max_position_embeddings", None) or LENGTH
    )
    length = config.length or min(LENGTH, made_for)
    batch_size = max(1, config.batch_tokens // length)
    peak, started = PeakMemory(model.device), time.perf_counter()
    texts = list(windows(corpus, length=length, count=config.windows, at=config.at))
    found = diagnose(
        model,
        texts,
        batch_size=batch_size,
        progress=None if progress is None else lambda: progress(batch_size),
    )
    if config.extrapolate > 1:

        def longer(tokens: int) -> Tensor:
            return next(iter(windows(corpus, length=tokens, count=1)))

        found = with_extrapolation(
            found, model, longer, trained=config.trained_length, factor=config.extrapolate
        )
    made = describe(model, name, {})
    del made["description"]
    yield {
        "kind": "run",
        "study": DIAGNOSIS,
        **made,
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "windows": len(texts),
        "at": config.at,
        "length": length,
        "batch_size": batch_size,
        "seconds": round(time.perf_counter() - started, 1),
        "peak_memory_bytes": peak.bytes(),
        "probes_hold_bytes": bytes_held(model, batch_size, length),
        "data": corpus.describe(),
    }
    for line in found.records():
        yield {**line, "run": name}
