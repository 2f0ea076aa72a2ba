"""The main job at the smallest scale: every preset, every measure, one page."""

import json
import os
import signal
from itertools import product
from pathlib import Path

import pytest
import torch

from clearhead.data import Batches
from clearhead.eval.sliding import perplexity
from clearhead.lab import compare as job
from clearhead.models import PRESETS as ALL
from clearhead.models import preset
from clearhead.records.loading import load

from .conftest import call, changed, lines_of, refusal, weights_of

PRESETS = [name for name in ALL if preset(name).direction == "causal"]
NULLS = ("softmax1", "sink", "key-bias", "softpick")  # with weight that no key gets


@pytest.fixture
def words(settings: list[str], tmp_path: Path) -> list[str]:
    small = ["--lengths", "1", "2", "--evaluation-tokens", "64"]
    return [*small, *settings, "--output", str(tmp_path / "out")]


def test_every_preset_is_trained_measured_and_shown(words, tmp_path, capsys, monkeypatch):
    given: dict[str, list[torch.Tensor]] = {}
    real = job.train_to_end

    def spy(model, batches, config, **options):
        given[options["description"]["run"]] = [batches.batch(i)["input_ids"] for i in (0, 1)]
        return real(model, batches, config, **options)

    monkeypatch.setattr(job, "train_to_end", spy)
    monkeypatch.setenv("COLUMNS", "160")  # for whole names
    words += ["--set", "hidden_size=48", "num_hidden_layers=1", "num_attention_heads=4"]
    other = changed(words, "--output", str(tmp_path / "other"))
    assert call("compare", "gpt2", *other, "--seeds", "1") == 0
    capsys.readouterr()
    words = [*PRESETS, *words]
    assert call("compare", *words) == 0
    # The same tokens in the same order, another order with another seed.
    for name in PRESETS:
        assert all(map(torch.equal, given[f"{name}/seed0"], given["transformer/seed0"]))
    assert not torch.equal(given["gpt2/seed0"][0], given["gpt2/seed1"][0])

    records = load(tmp_path / "out/records.jsonl")
    assert records.arms() == PRESETS
    out, err = capsys.readouterr()
    assert "one seed cannot tell these models apart" in err[: err.index("transformer, seed 0")]
    for name, (run,) in ((name, records.of(name)) for name in PRESETS):
        assert len(run.steps) == 2
        maps = ["map 1", "map 2", "difference"] if "differential" in name else ["softmax"]
        numbers = [("tokens_per_second", {}), ("peak_memory_bytes", {})]
        numbers.append(("perplexity", {"length": 16}))
        for metric, tokens in product(("kurtosis", "largest_activation"), ("first", "rest")):
            numbers.append((metric, {"tokens": tokens}))
        for metric, one in product(("first_token_argmax_share", "first_token_mass"), maps):
            numbers.append((metric, {"map": one}))
        assert all(run.value(metric, **at) is not None for metric, at in numbers), name
        assert (run.value("null_mass", map="softmax") is not None) == (name in NULLS)
        assert (run.value("prefix_mass", map="softmax") is not None) == (name == "key-value")
        assert name in out
    assert "differential" in (tmp_path / "out/report.html").read_text("utf-8")

    # The same command again has nothing to train; other settings are refused.
    monkeypatch.setattr(job, "train_to_end", lambda *_, **__: pytest.fail("trained again"))
    assert call("compare", *words) == 0
    said = refusal(capsys, "compare", *words, "--train.learning-rate", "0.5")
    assert "other settings: train.learning_rate was 0.003 and is now 0.5" in said


def test_a_record_has_the_precision_that_was_computed(words, tmp_path, capsys, monkeypatch):
    auto = ["transformer", *changed(words, "--train.precision", "auto")]
    native = [True]
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": native[0]})
    assert call("compare", *auto) == 0
    records = tmp_path / "out/records.jsonl"
    assert load(records).runs[0].precision == "bf16"
    native[0] = False  # a machine on which the same command computes something else
    assert "train.precision was 'bf16' and is now 'fp32'" in refusal(capsys, "compare", *auto)


@pytest.mark.parametrize("held_out", ["validation", "training"])
def test_a_signal_saves_and_the_same_command_goes_on(
    held_out, words, tmp_path, capsys, monkeypatch
):
    words = ["transformer", *words, "--held-out", held_out]
    real = Batches.batch
    sent = []

    def interrupting(self, step):
        if step == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return real(self, step)

    monkeypatch.setattr(Batches, "batch", interrupting)
    longer = changed(words, "--train.tokens", "96", "--measure-every", "0.01")
    assert call("compare", *longer) == 128 + signal.SIGTERM
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "out/report.html").exists()
    assert call("compare", *longer) == 0
    lines = (tmp_path / "out/records.jsonl").read_text().splitlines()
    steps = [json.loads(x)["step"] for x in lines if '"kind": "step"' in x]
    assert steps == [1, 2, 3]
    losses = [x for x in map(json.loads, lines) if x.get("metric") == "loss" and "step" in x]
    assert [x["step"] for x in losses] == [1, 2, 3]


def test_what_was_trained_with_documents_apart_is_measured_so(words, tmp_path, monkeypatch):
    notes = [json.dumps({"text": f"a note, the {number}th"}) for number in range(300)]
    (tmp_path / "notes.jsonl").write_text("\n".join(notes), "utf-8")
    words = ["transformer", *words, "--train.document-masks", "--measure-every", "0.01"]
    read = []

    def spy(*given, **options):
        read.append(perplexity(*given, **options))
        return read[-1]

    monkeypatch.setattr(job, "perplexity", spy)
    words = changed(words, "--data.data", str(tmp_path / "notes.jsonl"))
    assert call("compare", *words) == 0
    lines = lines_of(tmp_path / "out")
    losses = [x for x in lines if x.get("metric") == "loss"]
    assert [x["value"] for x in losses if "step" in x] == [found.loss for found in read]
    assert all(found.tokens < 15 * job.WINDOWS for found in read)
    for line in losses:
        if "step" not in line:
            assert line["predicted_tokens"] < 64 // line["length"] * (line["length"] - 1)
    assert lines[0]["documents"] == "apart"
    assert "Documents were kept apart, as in" in (tmp_path / "out/report.html").read_text("utf-8")


def test_without_lengths_the_speed_and_memory_of_training_alone_are_measured(settings, tmp_path):
    assert call("compare", "transformer", *settings, "--lengths", "--output", str(tmp_path)) == 0
    lines = lines_of(tmp_path)
    found = {x["metric"] for x in lines if x["kind"] == "measure"}
    assert found == {"train_seconds", "tokens_per_second", "peak_memory_bytes"}
    assert "training speed" in (tmp_path / "report.html").read_text("utf-8")


def test_a_run_trained_but_not_measured_is_measured(words, tmp_path, monkeypatch):
    words = ["transformer", *words]

    def broken(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "perplexity_by_length", broken)
    assert call("compare", *words) == 130
    monkeypatch.undo()
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    assert call("compare", *words) == 0
    lines = lines_of(tmp_path / "out")
    by_metric = {x["metric"]: x for x in lines if x["kind"] == "measure"}
    assert by_metric["peak_memory_bytes"]["value"] is None
    assert "stopped before" in by_metric["peak_memory_bytes"]["reason"]
    assert by_metric["perplexity"]["value"] > 1


def test_arms_are_compared_and_measured_on_the_way(words, tmp_path, capsys):
    arms = ["transformer", "softmax1", "--vary", "train.optimizer=adamw,orthoadam"]
    shape = ["--set", "num_hidden_layers=1", "hidden_size=48"]
    # Measured on the way or not, training takes the same course.
    assert call("compare", *arms, *words, *shape, "--measure-every", "0.5") == 0
    out = tmp_path / "out"
    names = [f"{p} · {o}" for p in ("transformer", "softmax1") for o in ("adamw", "orthoadam")]
    lines = lines_of(out)
    headers = [x for x in lines if x["kind"] == "run"]
    assert [x["arm"] for x in headers] == names
    assert headers[-1]["changes"] == {"train.optimizer": "orthoadam"}
    assert {x["model"]["num_hidden_layers"] for x in headers} == {1}
    assert (out / "softmax1+orthoadam-seed0" / "final").is_dir()
    for name in names:
        found = {
            (x["metric"], x.get("tokens"), x["step"]): x["value"]
            for x in lines
            if x["kind"] == "measure" and x["run"] == f"{name}/seed0" and "step" in x
        }
        for step in (1, 2):
            assert found["loss", None, step] > 1
            assert found["kurtosis", "first", step] > 1
            assert found["largest_activation", "rest", step] > 0
            assert 0 <= found["first_token_argmax_share", None, step] <= 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)

    other = changed([*arms, *words, *shape], "--output", str(tmp_path / "other"))
    assert call("compare", *other) == 0
    for name in ("softmax1+orthoadam-seed0", "transformer+adamw-seed0"):
        assert weights_of(out / name) == weights_of(tmp_path / "other" / name)
    said = refusal(capsys, "compare", *other, "--measure-every", "0.01")
    assert "other settings: measure_every was 0 and is now 1" in said


def test_a_run_that_diverges_is_a_result_of_the_sweep(words, tmp_path, capsys):
    rates = ["transformer", "--vary", "train.learning_rate=1e30,1e-3", *words]
    rates += ["--train.clip", "0", "--train.warmup", "0", "--measure-every", "0.01"]
    assert call("compare", *rates) == 0
    captured = capsys.readouterr()
    assert "learning_rate 1e+30, seed 0: stopped at step 2" in captured.err
    lines = lines_of(tmp_path / "out")
    found = {x["run"]: x for x in lines if x.get("metric") == "perplexity" and x["length"] == 16}
    rate = "transformer · learning_rate"
    diverged, trained = (found[f"{rate} {x}/seed0"] for x in ("1e+30", "0.001"))
    assert diverged["value"] is None
    assert "lower learning_rate" in diverged["reason"]
    assert trained["value"] > 1
    assert "lower learning_rate" in (tmp_path / "out/report.html").read_text("utf-8")
    assert call("compare", *rates) == 0  # and is not tried again
    assert "learning_rate 1e+30, seed 0: already done" in capsys.readouterr().err
    alone = [word.replace(",1e-3", "") for word in rates]
    assert call("compare", *changed(alone, "--output", str(tmp_path / "alone"))) == 2
    assert "no run stayed finite" in capsys.readouterr().err
