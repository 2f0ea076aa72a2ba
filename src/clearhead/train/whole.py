"""A run carried to its end, wherever it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from clearhead.models.loading import pretrained
from clearhead.records.manifest import verify_model
from clearhead.train import precision, run_dir
from clearhead.train.batches import BatchSource
from clearhead.train.config import TrainConfig
from clearhead.train.loop import train
from clearhead.train.parallel import is_sharded
from clearhead.train.result import InterruptedRun, TrainResult
from clearhead.train.world import joined


def train_to_end(
    model: PreTrainedModel,
    batches: BatchSource,
    config: TrainConfig,
    *,
    output: Path,
    **options: Any,
) -> tuple[PreTrainedModel, TrainResult | None]:
    """Begin the run in `output`, resume it, or open its finished model; `options` as `train`.

    Returns:
        The trained model in evaluation mode; and the result, None where the run was finished
        before.

    Raises:
        ClearheadError: as `train`; for a finished run of other settings, or whose model is damaged.
        InterruptedRun: after SIGINT or SIGTERM, once the run has saved.
    """
    final, kind, device = output / run_dir.FINAL, type(model), model.device
    with joined(config.timeout, alone=config.parallel != "fsdp") as world:
        finished = world.by_first(lambda: run_dir.is_finished(output))
        if finished:
            config = replace(config, precision=precision.resolve(config.precision, device))
            run_dir.check_same(output, run_dir.identity(model, batches, config))
            verify_model(final)
            return pretrained(kind, final).to(device), None
        resume = world.by_first(lambda: run_dir.holds_run(output))
        result = train(model, batches, config, output=output, resume=resume, **options)
        if result.stop_signal is not None:
            raise InterruptedRun(result.stop_signal)
        if is_sharded(result.model):  # no process can run it alone
            return pretrained(kind, final).to(device), result
        return result.model, result
