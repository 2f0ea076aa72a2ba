import io
import json
import sys
from types import SimpleNamespace

import pytest

from clearhead.train import MetricsFile, Progress, Run, StepMetrics, TensorBoard, TrainResult, WandB


@pytest.fixture
def run(tmp_path):
    return Run(
        name="[bold]llama", output=tmp_path, model=None, steps=40, first_step=0,
        record={"config": {"seed": 3}},
    )  # fmt: skip


def metrics(step):
    return StepMetrics(
        step=step, tokens=10 * step, seconds=0.5 * step, loss=4.0 / step, learning_rate=1e-3,
        gradient_norm=0.25, tokens_per_second=1234.5, batch_stall=0.0, seconds_left=3700.0,
    )  # fmt: skip


RESULT = TrainResult(
    model=None, steps=40, tokens=400, seconds=75.0, tokens_per_second=5.3,
    peak_memory_bytes=2**30, final_loss=0.1, stop_signal=None,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_are_cut_back_to_the_resumed_step(run, tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile()
    first.start(run)
    for step in range(1, 6):
        first.step(metrics(step))
    assert steps_in(path) == [1, 2, 3, 4, 5]  # before any close: a kill loses none
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # torn by a kill
    second = MetricsFile()
    second.start(Run(**{**vars(run), "first_step": 3}))
    second.step(metrics(4))
    second.close()
    assert steps_in(path) == [1, 2, 3, 4]


def test_progress_off_a_terminal_is_a_few_plain_lines(run):
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(run)
    for step in range(1, 41):
        progress.step(metrics(step))
    progress.checkpoint(run.output)
    progress.end(RESULT)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 20 + 2
    assert lines[20] == (
        "step 40/40  loss 0.1000  lr 1.00e-03  norm 0.25  1,234 tokens/s  1:01:40 left"
    )
    assert lines[-1].startswith("40 steps, 400 tokens in 1:15 (5 tokens/s), loss 0.1000")
    assert "\x1b" not in stream.getvalue()


def test_progress_on_a_terminal_writes_one_line_over_and_takes_names_literally(run):
    stream = Terminal()
    progress = Progress(stream)
    progress.start(run)
    progress.step(metrics(20))
    progress.checkpoint(run.output)
    progress.end(RESULT)
    shown = stream.getvalue()
    assert "\x1b" in shown
    assert "[bold]llama" in shown
    assert "loss 0.1000" in shown


def test_tensorboard_writes_the_scalars(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoard()
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
        callback = WandB()
        callback.start(Run(**{**vars(run), "first_step": first_step}))
        callback.step(metrics(first_step + 2))
        callback.close()
    assert [one for one in calls if isinstance(one[0], str) and one != "finish"] == [
        ("first", "allow"),
        ("first", "allow"),
        ("second", "allow"),
    ]
    assert calls[-1] == "finish"
