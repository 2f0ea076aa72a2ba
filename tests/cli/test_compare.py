"""The main job at the smallest scale: every preset, every measure, one page."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from clearhead.cli import main
from clearhead.data import Batches
from clearhead.experiments import compare as job
from clearhead.models import PRESETS as ALL
from clearhead.models import preset

PRESETS = [name for name in ALL if preset(name).direction == "causal"]


def _call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    return stop.value.code


@pytest.fixture
def words(settings: list[str], tmp_path: Path) -> list[str]:
    small = ["--lengths", "1", "2", "--evaluation-tokens", "64"]
    return ["--presets", *PRESETS, *small, *settings, "--output", str(tmp_path / "out")]


def test_every_preset_is_trained_measured_and_shown(words, tmp_path, capsys, monkeypatch):
    given: dict[str, list[torch.Tensor]] = {}
    real = job.train

    def spy(model, batches, config, **options):
        given[options["description"]["run"]] = [batches.batch(i)["input_ids"] for i in (0, 1)]
        return real(model, batches, config, **options)

    monkeypatch.setattr(job, "train", spy)
    assert _call(*words, "--seeds", "0", "1") == 0
    for seed in (0, 1):  # the same tokens in the same order, another order with another seed
        for name in PRESETS:
            for ours, theirs in zip(
                given[f"{name}/seed{seed}"], given[f"transformer/seed{seed}"], strict=True
            ):
                assert torch.equal(ours, theirs)
    assert not torch.equal(given["gpt2/seed0"][0], given["gpt2/seed1"][0])

    lines = [json.loads(x) for x in (tmp_path / "out/records.jsonl").read_text().splitlines()]
    assert [x["run"] for x in lines if x["kind"] == "run"] == [
        f"{name}/seed{seed}" for seed in (0, 1) for name in PRESETS
    ]
    assert sum(x["kind"] == "step" for x in lines) == 2 * 2 * len(PRESETS)
    for name in PRESETS:
        found = {}
        for line in lines:
            if line["kind"] != "measure" or line["run"] != f"{name}/seed0" or "layer" in line:
                continue
            dimensions = [line.get(key) for key in ("length", "map", "tokens")]
            found[(line["metric"], *(d for d in dimensions if d is not None))] = line
        maps = ["map 1", "map 2", "difference"] if "differential" in name else ["softmax"]
        for key in (
            ("perplexity", 16),
            ("tokens_per_second",),
            ("peak_memory_bytes",),
            ("chance_floor",),
            ("kurtosis", "first"),
            ("kurtosis", "rest"),
            ("largest_activation", "first"),
            ("largest_activation", "rest"),
            *(
                (metric, m)
                for metric in ("first_token_argmax_share", "first_token_mass")
                for m in maps
            ),
        ):
            assert found[key]["value"] is not None, (name, key)
        assert (("null_mass", "softmax") in found) == (name in ("softmax1", "sink"))
    assert {x["map"] for x in lines if x["kind"] == "attention"} == {
        "softmax",
        "map 1",
        "map 2",
        "difference",
    }
    out = capsys.readouterr().out
    for name in PRESETS:
        assert name in out
    page = (tmp_path / "out/report.html").read_text("utf-8")
    assert "differential" in page

    # The same command again has nothing to train; other settings are refused.
    monkeypatch.setattr(job, "train", lambda *_, **__: pytest.fail("trained again"))
    assert _call(*words, "--seeds", "0", "1") == 0
    assert _call(*words, "--train.learning-rate", "0.5") == 2
    assert "other settings (train: learning_rate)" in capsys.readouterr().err


def test_a_signal_saves_and_the_same_command_goes_on(words, tmp_path, capsys, monkeypatch):
    words = [*words, "--presets", "transformer"]
    real = Batches.batch
    sent = []

    def interrupting(self, step):
        if step == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return real(self, step)

    monkeypatch.setattr(Batches, "batch", interrupting)
    longer = [*words, "--train.tokens", "96"]
    assert _call(*longer) == 128 + signal.SIGTERM
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "out/report.html").exists()
    assert _call(*longer) == 0
    lines = (tmp_path / "out/records.jsonl").read_text().splitlines()
    steps = [json.loads(x)["step"] for x in lines if '"kind": "step"' in x]
    assert steps == [1, 2, 3]


def test_a_run_trained_but_not_measured_is_measured(words, tmp_path, monkeypatch):
    words = [*words, "--presets", "transformer"]

    def broken(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "measure", broken)
    assert _call(*words) == 130
    monkeypatch.undo()
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    assert _call(*words) == 0
    lines = [json.loads(x) for x in (tmp_path / "out/records.jsonl").read_text().splitlines()]
    by_metric = {x["metric"]: x for x in lines if x["kind"] == "measure"}
    assert by_metric["peak_memory_bytes"]["value"] is None
    assert "stopped before" in by_metric["peak_memory_bytes"]["reason"]
    assert by_metric["perplexity"]["value"] > 1
