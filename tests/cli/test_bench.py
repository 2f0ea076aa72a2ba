"""`clearhead bench`: from a checkout each benchmark, at a size of no meaning; else one line."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead
from benchmarks import (
    BENCHES,
    attention,
    blocks,
    encoders,
    evaluation,
    find,
    gpu,
    kernels,
    optimizer,
    tables,
    training,
    turned,
)
from benchmarks.race import in_new_process
from clearhead import ClearheadForCausalLM, preset
from clearhead.cli import VERBS, main
from clearhead.cli.bench import Command

from .conftest import call


def test_an_installed_package_says_where_its_benchmarks_are(tmp_path):
    shutil.copytree(Path(clearhead.__file__).parent, tmp_path / "clearhead")
    ran = subprocess.run(
        [sys.executable, "-m", "clearhead", "bench", "kernel"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("clearhead: benchmarks are not part of an installed clearhead: clone")


def test_every_benchmark_is_found_named_in_the_help_and_no_other(capsys):
    assert all(callable(find(name)) for name in BENCHES)
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Benchmarks: {', '.join(BENCHES)}." in told
    assert {*Command().names} <= {*BENCHES}
    assert call("bench", "kernle") == 2
    assert "did you mean kernel" in capsys.readouterr().err


def test_a_peak_is_measured_in_a_process_of_its_own():
    assert in_new_process("attention._resident") > 2**20


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """bench(names, *changes): the lines of benchmarks, each change a module, a name and a value."""

    def run(names, *changes, rounds=1):
        for module, name, value in changes:
            monkeypatch.setattr(module, name, value)
        for module in (blocks, optimizer):
            monkeypatch.setattr(module, "compiled", lambda *_: contextlib.nullcontext())
        out = tmp_path / "bench.jsonl"
        assert call("bench", *names, "--rounds", str(rounds), "--output", str(out)) == 0
        lines = [json.loads(text) for text in out.read_text().splitlines()]
        assert all(line["ratio"] > 0 and line["device"] and line["versions"] for line in lines)
        return lines

    return run


def _tiny(setting, **size):
    changes = setting.changes | SMALL | HEADS
    return "_setting", lambda: dataclasses.replace(setting, changes=changes, **size)


def test_bench_takes_turns(bench, capsys, monkeypatch):
    monkeypatch.setitem(attention.TOKENS, "cpu", 512)
    (line,) = bench(["kernel"], rounds=2)
    assert line["bound"] == 1.1
    assert all(len(times) == 2 for times in line["seconds"].values())
    assert "softmax-1" in capsys.readouterr().out


def test_bench_of_lengths_and_decoding(bench, monkeypatch):
    """A variant's name, width and length, and the device, in every line."""
    monkeypatch.setitem(kernels.SHAPES, "cpu", (64, (32,), (16,), 64))
    monkeypatch.setitem(kernels.CACHES, "cpu", ((1,), (40,)))
    lines = bench(["lengths", "decoding"], (kernels, "MODEL", SMALL | HEADS))
    ours = [line["ours"] for line in lines]
    assert ours[:7] == ["softmax", "softmax-1", "sink", "documents", "padding", "V1", "V2"]
    assert ours[7:] == ["softmax", "V1", "CoCA", "transformer", "differential", "coca"]
    assert lines[0]["name"] == "attention, D 16, T 32"


def test_bench_of_layers(monkeypatch):
    monkeypatch.setitem(attention.TOKENS, "cpu", 512)
    for name in ("transformer", *attention.BOUNDS):
        attention._layer_step(name, 512, "fp32", "eager")()


def test_what_the_bench_calls_compiled_is():
    model = ClearheadForCausalLM(preset("transformer", hidden_size=32, num_attention_heads=2))
    training._prepared(model, "compiled")
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)


def test_bench_of_orthoadam(bench, capsys):
    lines = bench(
        ["orthoadam"],
        (optimizer, "OPTIMIZER_SHAPE", {**optimizer.OPTIMIZER_SHAPE, **SMALL}),
        (optimizer, "OPTIMIZER_BATCH", 1),
        (optimizer, "OPTIMIZER_LENGTH", 16),
    )
    assert [line["bound"] for line in lines] == [1.1, 1.2, 0.333, 0.333]
    assert "dense products in Python" in capsys.readouterr().out


def test_bench_of_blocks(bench, capsys):
    setting = _tiny(blocks.CPU, batch=1, length=16)
    lines = bench(["blocks"], (blocks, *setting), (blocks, "PROMPT", 4), (blocks, "DECODED", 2))
    assert len(lines) == 3 * 5
    ours = {line["ours"].split(",")[0]: line["bound"] for line in lines}
    assert list(ours) == ["parallel", "sas", "sas-p", "skipless", "sas-p-nonorm"]
    assert [bound is None for bound in ours.values()] == [False] * 3 + [True] * 2
    assert sum("aim" in line for line in capsys.readouterr().out.splitlines()) == 3 * 3


def test_bench_of_encoders(bench):
    asked = []
    setting = _tiny(encoders.CPU, batch=8, length=16)
    step = lambda *given: asked.append(given) or training.optimizer_step(*given)  # noqa: E731
    lines = bench(["encoders"], (encoders, *setting), (encoders, "optimizer_step", step))
    assert [line["ours"].split(",")[0] for line in lines] == ["bert-sas", "bert-sas-p"]
    assert all(line["bound"] is None for line in lines)
    for _model, _optimizer, ids, labels in asked:
        hidden = labels != -100
        assert 0 < hidden.sum() < ids.numel() / 2, "a quarter is predicted, by chance"
        assert (labels[hidden] == ids[hidden]).all()


def test_the_benchmarks_of_evaluations_run(bench):
    sizes = {"LENGTHS": (128,), "TRIALS": 1, "TOKENS": 256, "WINDOW": 64, "STRIDE": 32}
    sweep, windows = bench(["passkey", "sliding"], *((evaluation, *one) for one in sizes.items()))
    assert sweep["peer"] == "180 s"
    assert windows["bound"] == 1.1
    assert set(windows["seconds"]) == {"sliding losses", "the windows' forwards"}


def test_the_benchmark_of_starting_measures_every_verb(bench):
    lines = bench(["start"])
    assert [line["ours"] for line in lines] == [f"{verb} --help, CPU seconds" for verb in VERBS]
    assert all(line["ratio"] == next(iter(line["seconds"].values()))[0] for line in lines)


def test_bench_of_a_turned_model(bench):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {**turned.SHAPE, **SMALL, **heads}
    lines = bench(["turned"], (turned, "SHAPE", shape), (turned, "TOKENS", 16))
    assert [line["ours"] for line in lines] == ["transformer", "turned", "turned, prefix"] * 2
    assert {line["name"] for line in lines} == {"decoding, 4 tokens", "16 tokens"}
    assert all(line["bound"] == 1 / 0.97 for line in lines)


def test_the_page_has_the_tables_of_the_records():
    page = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    assert tables.markdown() in page


def test_the_parts_of_a_gpu_run_alone_print_a_table_and_write_records(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    words = ["figures", "attention", "--device", "cpu", "--toy", "--output", str(output)]
    gpu.main(words)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {"softmax", "softmax-1", "sink", "V1"} <= {record["ours"] for record in records}
    assert "| attention, T 64: softmax | PyTorch softmax |" in capsys.readouterr().out
    assert all(sum(part.seconds for part in parts.values()) <= 240 for parts in gpu.PARTS.values())
    with pytest.raises(SystemExit):
        gpu.main(["figures", "los", "--device", "cpu"])


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, parts in gpu.PARTS.items() for part in parts]
)
def test_every_part_of_a_gpu_runs_on_a_cpu(kind, part, monkeypatch, capsys):
    """Uncompiled: each import, shape and name is used."""
    for module in (gpu.gpu_checks, gpu.gpu_figures):
        monkeypatch.setattr(module, "compiled", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    gpu.main([kind, part, "--device", "cpu", "--toy"])
    out = capsys.readouterr().out
    assert f"== {part} took" in out
    assert "FAILED" not in out
    assert "out of time" not in out


def test_a_peak_is_beside_the_planned_one():
    size = gpu.gpu_figures.SIZES["350M"]._replace(shape=gpu.gpu_figures.TINY, rows=2)
    (ratio,) = gpu.gpu_figures._planned("350M", "transformer", size, 2**30)
    assert ratio.peer == "plan"
    assert ratio.ratio > 1
