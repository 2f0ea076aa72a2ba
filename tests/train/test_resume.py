"""Resume is resume: real processes, really killed."""

import json
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
    "masked, on a ramp": {
        "masked": True, "accumulation": 3, "ramp": 0.6, "schedule": "triangle", "warmup": 0.75,
        "final_learning_rate": 0.0, "weight_decay": 0.01,
    },
}  # fmt: skip
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
        masked = config.get("masked", False)
        config = {key: value for key, value in config.items() if key != "masked"}
        assert trainer(outputs[name], config, masked=masked)[0] == 0
    return outputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_twice_and_resumed_is_bit_identical(trainer, unbroken, tmp_path, variant):
    output, config = tmp_path / "run", dict(VARIANTS[variant])
    how = {"masked": config.pop("masked", False)}
    # Between two saves, after step 6; then in the middle of step 11, two steps past a save, or of
    # step 13 on a ramp.
    middle = 15 if "ramp" in config else 11 * config.get("accumulation", 1) - 1
    assert trainer(output, config, signal=[6, signal.SIGKILL], **how)[0] == KILL
    assert trainer(output, config, resume=True, kill_in_batch=middle, **how)[0] == KILL
    assert trainer(output, config, resume=True, **how)[0] == 0
    assert weights(output) == weights(unbroken[variant])
    other = ("run", "batch_stall")
    resumed, whole = (
        [{k: v for k, v in line.items() if "second" not in k and k not in other} for line in lines]
        for lines in map(steps, (output, unbroken[variant]))
    )
    assert resumed == whole
    assert [line["step"] for line in resumed] == list(range(1, len(whole) + 1))
    record = json.loads((output / "run.json").read_text())
    assert [one["step"] for one in record["resumed"]] == ([4, 12] if "ramp" in config else [4, 8])


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
    assert f"{path}, line 1: not a record: " in log
    path.write_bytes(content.partition(b"\n")[2])
    assert trainer(output, resume=True)[0] == 0
    assert [line["step"] for line in steps(output)] == list(range(2, 13))
    assert weights(output) == weights(unbroken["plain"])


def test_a_run_folder_that_vanishes_is_an_error(trainer, tmp_path):
    output = tmp_path / "run"
    status, log = trainer(output, {"log_every": 1}, gone=6)
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
