"""The training loop."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from clearhead.models.loading import pretrained
from clearhead.nn.annealing import advance
from clearhead.optim import learning_rate
from clearhead.records.manifest import verify_model
from clearhead.train import precision, run_dir, world
from clearhead.train.batches import BatchSource
from clearhead.train.callbacks import Callback, InterruptedRun, TrainResult
from clearhead.train.config import TrainConfig
from clearhead.train.parallel import accumulate, is_sharded, whole
from clearhead.train.training_run import TrainingRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def train(
    model: "PreTrainedModel",
    batches: BatchSource,
    config: TrainConfig,
    *,
    output: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    description: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train `model` in place, on the device it is on; records and checkpoints go to `output`.

    Step s uses the batches from config.starts[s] to before config.starts[s + 1]. PyTorch's
    generators are seeded with `config.seed`; weights are cast to float32. SIGINT, SIGTERM and
    SIGHUP stop the run after the current step, with a checkpoint.

    Under torchrun the processes share every step and write one folder, the same tokens in the same
    order however many they are; each calls this function with the same arguments. Callbacks are
    called in the first process only. After a restart by torchrun the run is resumed.

    Args:
        model: any Hugging Face causal language model; a masked one or a classifier with such
            batches.
        batches: see `BatchSource`.
        config: the settings; "auto" is resolved, and recorded as resolved.
        output: the run folder; it must hold no run, or with `resume` the run to continue. A
            finished one is extended by more tokens under its own schedule_tokens.
        tokenizer: saved with every checkpoint.
        resume: continue from the newest checkpoint. `model` must be built as it was for the run.
        callbacks: called at every step; metrics.jsonl is written in any case.
        description: JSON values for run.json; its "run" names the run in the records.

    Raises:
        ClearheadError: for settings that do not fit the model, the batches or the run resumed; for
            a damaged checkpoint; for a full disk. Checkpoints written before stay.
        DivergedError (a ClearheadError): for a loss, a gradient or weights that are not finite.
    """
    with (
        world.joined(config.timeout, alone=config.parallel != "fsdp") as processes,
        ExitStack() as stack,
    ):
        about = (Path(output), tokenizer, resume, callbacks, description or {})
        run = TrainingRun(stack, processes, model, batches, config, *about)
        config = run.config
        model.train()
        advance(model, config.done(run.step))
        while run.step < config.steps and run.stopped_by is None:
            started = time.perf_counter()
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(run.step, config)
            run.optimizer.zero_grad(set_to_none=True)
            loss = accumulate(model, run.micro_batches(), run.precision, run.objective, run.spread)
            parameters = [p for p in model.parameters() if p.grad is not None]
            norm = whole(get_total_norm([p.grad for p in parameters]))
            run.loss, run.gradient_norm = run.finite(loss, norm)
            if config.clip:
                clip_grads_with_norm_(parameters, config.clip, norm)
            advance(model, config.done(run.step + 1))
            run.optimizer.step()
            run.seconds += time.perf_counter() - started
            run.step += 1
            run.log_if_due()
            if run.step % (config.save_every or config.steps) == 0:
                run.save()
            run.hear_signals()
        return run.end()


def train_to_end(
    model: "PreTrainedModel",
    batches: BatchSource,
    config: TrainConfig,
    *,
    output: Path,
    **options: Any,
) -> "tuple[PreTrainedModel, TrainResult | None]":
    """Begin the run in `output`, resume it, or load its finished model; `options` as in `train`.

    Returns:
        The trained model in evaluation mode; and the result, None if the run was already
        finished.

    Raises:
        ClearheadError: as `train`; for a finished run of other settings, or whose model is damaged.
        InterruptedRun: after SIGINT or SIGTERM, once the run has saved.
    """
    final, kind, device = output / run_dir.FINAL, type(model), model.device
    with world.joined(config.timeout, alone=config.parallel != "fsdp") as processes:
        finished = processes.by_first(lambda: run_dir.is_finished(output))
        if finished:
            config = replace(config, precision=precision.resolve(config.precision, device))
            asked = run_dir.comparable(run_dir.identity(model, batches, config))
            run_dir.refuse_changes(output, run_dir.comparable(run_dir.read_record(output)), asked)
            verify_model(final)
            return pretrained(kind, final).to(device), None
        resume = processes.by_first(lambda: run_dir.holds_run(output))
        result = train(model, batches, config, output=output, resume=resume, **options)
        if result.stop_signal is not None:
            raise InterruptedRun(result.stop_signal)
        if is_sharded(result.model):  # no process can run it alone
            return pretrained(kind, final).to(device), result
        return result.model, result
