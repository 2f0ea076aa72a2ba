"""Resume is resume: real processes, really killed."""

import itertools
import json
import random
import shutil
import signal

import pytest
from tests_architectures import takes_adapters

from clearhead.records import jsonl

KILL = -signal.SIGKILL
VARIANTS = {
    "plain": {},
    "accumulation and bf16": {"accumulation": 2, "precision": "bf16"},
    "muon": {"optimizer": "muon", "adamw_patterns": ["*.o_proj.*"]},
    "sgd": {"optimizer": "sgd"},
    "rmsprop": {"optimizer": "rmsprop"},
    "adafactor": {"optimizer": "adafactor"},
    "a layer frozen, by orthoadam": {"optimizer": "orthoadam", "freeze": ["*.layers.0.*"]},
}
if takes_adapters():
    lora = {"optimizer": "muon", "lora": 2, "only": ["*self_attn*"]}
    VARIANTS["lora of attention, by muon"] = lora


def weights(output):
    return (output / "final" / "model.safetensors").read_bytes()


def steps(output):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def unbroken(trainer, tmp_path_factory):
    """The runs never stopped, one a variant."""
    outputs = {}
    for number, (name, config) in enumerate(VARIANTS.items()):
        outputs[name] = tmp_path_factory.mktemp("unbroken") / str(number)
        assert trainer(outputs[name], config)[0] == 0
    return outputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_twice_and_resumed_is_bit_identical(trainer, unbroken, tmp_path, variant):
    output = tmp_path / "run"
    config = VARIANTS[variant]
    # Between two saves, after step 6; then in the middle of step 11, two steps past a save.
    middle = 10 * config.get("accumulation", 1) + config.get("accumulation", 1) - 1
    assert trainer(output, config, signal=[6, signal.SIGKILL])[0] == KILL
    assert trainer(output, config, resume=True, kill_in_batch=middle)[0] == KILL
    assert trainer(output, config, resume=True)[0] == 0
    assert weights(output) == weights(unbroken[variant])
    other = ("run", "batch_stall")
    untimed = [
        {k: v for k, v in line.items() if "second" not in k and k not in other}
        for each in (output, unbroken[variant])
        for line in steps(each)
    ]
    assert untimed[:12] == untimed[12:]
    assert [line["step"] for line in steps(output)] == list(range(1, 13))
    record = json.loads((output / "run.json").read_text())
    assert [resumed["step"] for resumed in record["resumed"]] == [4, 8]


def test_masked_training_on_a_ramp_killed_twice_is_bit_identical(trainer, tmp_path):
    recipe = {"accumulation": 3, "ramp": 0.6, "schedule": "triangle", "warmup": 0.75}
    config = {**recipe, "final_learning_rate": 0.0, "weight_decay": 0.01}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert trainer(whole, config, masked=True)[0] == 0
    assert trainer(broken, config, masked=True, signal=[6, signal.SIGKILL])[0] == KILL
    assert trainer(broken, config, masked=True, resume=True, kill_in_batch=15)[0] == KILL
    assert trainer(broken, config, masked=True, resume=True)[0] == 0
    assert weights(broken) == weights(whole)
    told = [(line["step"], line["tokens"], line["loss"]) for line in steps(whole)]
    assert [(line["step"], line["tokens"], line["loss"]) for line in steps(broken)] == told
    sizes = [b[1] - a[1] for a, b in itertools.pairwise([(0, 0), *told])]
    assert sizes[0] == 32
    assert sizes[-1] == 3 * 32
    record = json.loads((broken / "run.json").read_text())
    assert record["data"] == "tiny, 0.25 hidden"
    assert [resumed["step"] for resumed in record["resumed"]] == [4, 12]


def test_killed_before_the_first_save_and_while_saving(trainer, unbroken, tmp_path):
    output = tmp_path / "run"
    assert trainer(output, signal=[2, signal.SIGKILL])[0] == KILL
    assert not (output / "checkpoints").exists()
    assert trainer(output, resume=True, kill_in_save=True)[0] == KILL
    assert [path.name for path in (output / "checkpoints").iterdir()] == [".writing-step-00000004"]
    assert trainer(output, resume=True)[0] == 0
    assert weights(output) == weights(unbroken["plain"])
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000012"]
    shutil.rmtree(output / "final")  # as between the last checkpoint and the final model
    assert trainer(output, resume=True)[0] == 0
    assert weights(output) == weights(unbroken["plain"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(trainer, unbroken, tmp_path, number):
    output = tmp_path / "run"
    status, log = trainer(output, signal=[6, number])
    assert status == 128 + number
    assert "6 steps, 192 tokens" in log
    assert f"stopped by {number.name}" in log
    assert (output / "checkpoints" / "step-00000006").is_dir()
    assert not (output / "final").exists()
    assert trainer(output, resume=True)[0] == 0
    assert weights(output) == weights(unbroken["plain"])


def test_a_second_interrupt_stops_at_once(trainer, tmp_path):
    output = tmp_path / "run"
    status, log = trainer(output, signal=[6, signal.SIGINT, 2])
    assert status == 1
    assert "KeyboardInterrupt" in log
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_damaged_line_is_refused_by_its_number_until_it_is_deleted(trainer, unbroken, tmp_path):
    output = tmp_path / "run"
    assert trainer(output, signal=[6, signal.SIGKILL])[0] == KILL
    path = output / "metrics.jsonl"
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)
    status, log = trainer(output, resume=True)
    assert status == 2
    assert f"{path}, line 1: not a step: " in log
    assert "mend that line, or delete it" in log
    path.write_bytes(content.partition(b"\n")[2])
    assert trainer(output, resume=True)[0] == 0
    assert [line["step"] for line in steps(output)] == list(range(2, 13))
    assert weights(output) == weights(unbroken["plain"])


def test_killed_at_any_change_of_a_file_the_run_goes_on(trainer, unbroken, tmp_path):
    """Whatever the file is: lock, run.json, metrics, checkpoint, pruning, final model."""
    output = tmp_path / "run"
    draw = random.Random(3)
    killed = 0
    for number in [*range(6), *(draw.randrange(12, 40) for _ in range(12))]:
        if (output / "final").exists():
            shutil.rmtree(output)
        # As a person does: with --resume where there is a run.
        status, log = trainer(output, resume=(output / "run.json").exists(), kill_at=number)
        assert status in (0, KILL), log
        killed += status == KILL
    assert killed >= 12
    if not (output / "final").exists():
        assert trainer(output, resume=(output / "run.json").exists())[0] == 0
    assert weights(output) == weights(unbroken["plain"])
    assert [line["step"] for line in steps(output)] == list(range(1, 13))
    names = sorted(path.name for path in output.iterdir())
    assert names == ["checkpoints", "final", "metrics.jsonl", "run.json"]


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_folder_that_vanishes_is_an_error(trainer, tmp_path, how):
    output = tmp_path / "run"
    status, log = trainer(output, {"log_every": 1}, gone=[6, how])
    assert status == 2
    assert f"cannot write {output / 'metrics.jsonl'} (No such file or directory)" in log
    assert not output.exists()


def test_a_disk_that_fills_with_metrics_is_named_with_the_advice(trainer, tmp_path):
    output = tmp_path / "run"
    config = {"tokens": 10_000 * 32, "save_every": 0, "log_every": 1}
    status, log = trainer(output, config, file_limit=8000)
    assert status == 2
    assert f"cannot write {output}/metrics.jsonl (File too large): make room and resume" in log
    assert "Traceback" not in log
    whole = [line["step"] for line in jsonl.steps(output / "metrics.jsonl")]
    assert len(whole) > 20
    assert whole == list(range(1, len(whole) + 1))
