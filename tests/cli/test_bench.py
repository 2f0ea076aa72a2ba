"""`clearhead bench`: from a checkout each benchmark, at a size of no meaning; else one line."""

import contextlib
import dataclasses
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
    turned,
)
from clearhead.cli.bench import Command

from .conftest import call, lines_of, refusal


def test_an_installed_package_says_where_its_benchmarks_are(tmp_path):
    shutil.copytree(Path(clearhead.__file__).parent, tmp_path / "clearhead")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "clearhead", "bench", "kernel"]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 2
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("clearhead: benchmarks are not part of an installed clearhead: clone")


def test_every_benchmark_is_found_named_in_the_help_and_no_other(capsys):
    assert all(callable(find(name)) for name in BENCHES)
    assert call("bench", "--help") == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Benchmarks: {', '.join(BENCHES)}." in told
    assert {*Command().names} <= {*BENCHES}
    assert "did you mean kernel" in refusal(capsys, "bench", "kernle")


@pytest.fixture
def uncompiled(monkeypatch):
    for module in (blocks, optimizer, gpu.gpu_checks, gpu.gpu_figures):
        monkeypatch.setattr(module, "compiled", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _tiny(setting, **size):
    changes = setting.changes | SMALL | HEADS
    return "_setting", lambda: dataclasses.replace(setting, changes=changes, **size)


# Benchmark → what makes it small: modules, names and values.
TINY = {
    "kernel": [],
    "lengths": [(kernels, "MODEL", SMALL | HEADS)],
    "decoding": [(kernels, "MODEL", SMALL | HEADS)],
    "orthoadam": [
        (optimizer, "OPTIMIZER_SHAPE", {**optimizer.OPTIMIZER_SHAPE, **SMALL}),
        *((optimizer, "OPTIMIZER_BATCH", 1), (optimizer, "OPTIMIZER_LENGTH", 16)),
    ],
    "blocks": [
        (blocks, *_tiny(blocks.CPU, batch=1, length=16)),
        *((blocks, "PROMPT", 4), (blocks, "DECODED", 2)),
    ],
    "encoders": [(encoders, *_tiny(encoders.CPU, batch=8, length=16))],
    "passkey": [],
    "sliding": [],
    "turned": [(turned, "SHAPE", {**turned.SHAPE, **SMALL, **GROUPED}), (turned, "TOKENS", 16)],
}
SIZES = {"LENGTHS": (128,), "TRIALS": 1, "TOKENS": 256, "WINDOW": 64, "STRIDE": 32}


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_and_writes_its_lines(name, uncompiled, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(attention.TOKENS, "cpu", 512)
    monkeypatch.setitem(kernels.SHAPES, "cpu", (64, (32,), (16,), 64))
    monkeypatch.setitem(kernels.CACHES, "cpu", ((1,), (40,)))
    for module, key, value in (*TINY[name], *((evaluation, *size) for size in SIZES.items())):
        monkeypatch.setattr(module, key, value)
    assert call("bench", name, "--rounds", 2, "--output", tmp_path / "records.jsonl") == 0
    lines = lines_of(tmp_path)
    assert all(line["ratio"] > 0 and line["device"] and line["versions"] for line in lines)
    rounds = {len(times) for line in lines for times in line["seconds"].values()}
    assert rounds == {2} or name == "passkey"  # which takes one of minutes
    assert lines[0]["ours"].split(",")[0] in capsys.readouterr().out


def test_the_page_has_the_tables_of_the_records():
    page = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    assert tables.markdown() in page


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, parts in gpu.PARTS.items() for part in parts]
)
def test_every_part_of_a_gpu_runs_on_a_cpu(kind, part, uncompiled, tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    gpu.main([kind, part, "--device", "cpu", "--toy", "--output", str(output)])
    out = capsys.readouterr().out
    assert f"== {part} took" in out
    assert "FAILED" not in out
    assert "out of time" not in out
    if (kind, part) == ("figures", "attention"):
        sides = {line["ours"] for line in lines_of(tmp_path)}
        assert {"softmax", "softmax-1", "sink", "V1"} <= sides
        assert "| attention, T 64: softmax | PyTorch softmax |" in out
