"""Settings of a training, and what hears of its steps."""

import io
import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from clearhead import train
from clearhead.errors import ClearheadError

CPU = torch.device("cpu")


def test_steps_are_the_whole_ones_the_budget_pays_for():
    config = train.TrainConfig(tokens=1000, sequence_length=10, batch_size=3, accumulation=4)
    assert config.tokens_per_step == 120
    assert config.steps == 8
    assert list(config.starts) == [4 * step for step in range(9)]
    assert config.used(1) == 1 / 8


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"tokens": 0}, "tokens is 0.*at least 1"),
        ({"tokens": 3e5}, "tokens is 300000.0.*whole number"),
        ({"batch_size": True}, "batch_size is True.*whole number"),
        ({"learning_rate": math.nan}, "learning_rate is nan.*above 0"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'.*above 0"),
        ({"clip": math.inf}, "clip is inf.*at least 0"),
        ({"warmup": 100}, "warmup is 100.*between 0 and 1"),
        *(({"betas": betas}, "betas is .*two numbers") for betas in ((0.9, 1.0), (0.9,), 0.9)),
        ({"document_masks": "yes"}, "document_masks is 'yes'.*true or false"),
        ({"schedule": "cosin"}, "schedule .*did you mean cosine"),
        ({"precision": None}, "precision .*auto"),
        ({"optimizer": "orthadam"}, "optimizer .*did you mean orthoadam"),
        ({"momentum": 0.9}, "momentum.*choose muon or rmsprop or sgd"),
        ({"rotation": "haar"}, "rotation.*choose orthoadam"),
        ({"adamw_patterns": ("*.bias",)}, "adamw_patterns.*leave it out"),
        ({"optimizer": "orthoadam", "adamw_patterns": "*.bias"}, "give patterns such as"),
        ({"tokens": 2047}, "less than one step of 2048"),
        ({"ramp": 0.5}, "ramp is 0.5, but accumulation is 1"),
        ({"schedule_tokens": 5}, "schedule_tokens is 5, less than one step of 2048"),
    ],
)
def test_a_bad_setting_is_one_line_with_the_value_and_what_works(settings, wanted):
    with pytest.raises(ClearheadError, match=wanted) as caught:
        train.TrainConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx512_f": True}, "fp32")],
)
def test_auto_is_bf16_where_the_hardware_multiplies_it(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert train.precision.resolve("auto", CPU) == expected
    assert train.precision.resolve("fp32", CPU) == "fp32"
    assert train.precision.resolve("bf16", CPU) == "bf16"


def test_a_ramp_grows_linearly_to_the_full_step():
    config = train.TrainConfig(
        tokens=2 * 4 * 400, sequence_length=4, batch_size=2, accumulation=16, ramp=0.6
    )
    sizes = [config.starts[s + 1] - config.starts[s] for s in range(config.steps)]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    for step, size in enumerate(sizes):
        used = config.starts[step] / 400
        assert size == min(16, 1 + int(15 * used / 0.6))
    assert sizes[-1] == 16
    assert 400 - 16 < config.starts[-1] <= 400
    assert config.tokens_before(config.steps) == config.starts[-1] * 8


def test_a_longer_run_begins_as_its_plan_does():
    sizes = {"sequence_length": 4, "batch_size": 2, "accumulation": 16, "ramp": 0.6}
    plan = train.TrainConfig(tokens=8 * 400, **sizes)
    longer = train.TrainConfig(tokens=8 * 900, schedule_tokens=8 * 400, **sizes)
    assert longer.starts[: plan.steps + 1] == plan.starts
    assert {b - a for a, b in itertools.pairwise(longer.starts[plan.steps :])} == {16}
    assert [longer.used(step) for step in range(plan.steps)] == [
        plan.used(step) for step in range(plan.steps)
    ]
    assert longer.used(longer.steps) == longer.done(longer.steps) == 1.0
    assert longer.done(plan.steps // 2) == plan.done(plan.steps // 2) < 1


@pytest.mark.parametrize("schedule", ["cosine", "linear", "triangle"])
def test_a_plan_that_ends_at_rate_0_is_not_extended(schedule):
    ends = {"schedule": schedule, "final_learning_rate": 0.0, "schedule_tokens": 200_000}
    with pytest.raises(ClearheadError, match="ends after 200000 tokens at learning rate 0"):
        train.TrainConfig(**ends)
    train.TrainConfig(**{**ends, "schedule": "constant"})
    train.TrainConfig(**{**ends, "schedule_tokens": 400_000})


def test_fine_tuning_is_so_many_epochs_of_steps_with_the_settings_of_any_training():
    config = train.FinetuneConfig(
        epochs=3, batch_size=4, max_length=16, optimizer="sgd", save_every=5
    )
    run = config.run(per_epoch=7, seed=2)
    assert list(run.starts) == list(range(22))
    assert (run.optimizer, run.save_every, run.seed, run.betas) == ("sgd", 5, 2, (0.9, 0.98))
    with pytest.raises(ClearheadError, match="choose muon or rmsprop or sgd"):
        train.FinetuneConfig(momentum=0.9)
    with pytest.raises(ClearheadError, match="max_length is 2"):
        train.FinetuneConfig(max_length=2)


@pytest.fixture
def run(tmp_path):
    return train.Run(
        name="[bold]llama", output=tmp_path, model=None, steps=40, first_step=0,
        record={"config": {"seed": 3}},
    )  # fmt: skip


def metrics(step):
    return train.StepMetrics(
        step=step, tokens=10 * step, seconds=0.5 * step, loss=4.0 / step, learning_rate=1e-3,
        gradient_norm=0.25, tokens_per_second=1234.5, batch_stall=0.0, seconds_left=3700.0,
    )  # fmt: skip


RESULT = train.TrainResult(
    model=None, steps=40, tokens=400, seconds=75.0, tokens_per_second=5.3,
    peak_memory_bytes=2**30, final_loss=0.1, stop_signal=None,
)  # fmt: skip


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_are_cut_back_to_the_resumed_step(run, tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = train.MetricsFile()
    first.start(run)
    for step in range(1, 6):
        first.step(metrics(step))
    assert steps_in(path) == [1, 2, 3, 4, 5]  # before any close: a kill loses none
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # torn by a kill
    second = train.MetricsFile()
    second.start(train.Run(**{**vars(run), "first_step": 3}))
    second.step(metrics(4))
    second.close()
    assert steps_in(path) == [1, 2, 3, 4]


def test_progress_off_a_terminal_is_a_few_plain_lines(run):
    stream = io.StringIO()
    progress = train.Progress(stream)
    progress.start(run)
    for step in range(1, 41):
        progress.step(metrics(step))
    progress.checkpoint(run.output)
    progress.end(RESULT)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 20 + 2
    assert lines[20] == (
        "step 40/40  loss 0.1000  lr 1.00e-03  norm 0.25  1,234 tokens/s  62 min left"
    )
    assert lines[-1].startswith("40 steps, 400 tokens in 75 s (5 tokens/s), loss 0.1000")
    assert "\x1b" not in stream.getvalue()


def test_tensorboard_writes_the_scalars(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = train.TensorBoard()
    callback.start(run)
    callback.step(metrics(1))
    callback.step(metrics(2))
    callback.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 2.0)]


def test_wandb_goes_on_with_a_resumed_run_and_begins_a_new_one_otherwise(run, monkeypatch):
    calls, ids = [], iter(["first", "second"])
    fake = SimpleNamespace(
        init=lambda **kwargs: calls.append((kwargs["id"], kwargs["resume"])),
        log=lambda values, step: calls.append((step, values["train/loss"])),
        finish=lambda: calls.append("finish"),
        util=SimpleNamespace(generate_id=lambda: next(ids)),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first_step in (0, 20, 0):  # the last in the same folder, emptied
        callback = train.WandB()
        callback.start(train.Run(**{**vars(run), "first_step": first_step}))
        callback.step(metrics(first_step + 2))
        callback.close()
    begun = [one for one in calls if isinstance(one[0], str) and one != "finish"]
    assert begun == [(name, "allow") for name in ("first", "first", "second")]
    assert calls[-1] == "finish"
