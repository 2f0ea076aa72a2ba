"""Calls of the package before the work of a verb begins: bounds that go down only."""

import json
import os
import subprocess
import sys

import pytest

from .conftest import changed

# Counts calls of functions of the package until WHERE is called; comprehensions are none of them,
# since later versions of Python inline them.
PROGRAM = """
import os, sys, clearhead
from clearhead import cli

package, where = os.path.dirname(clearhead.__file__) + "/", sys.argv[1]
calls = 0

def count(frame, event, argument):
    global calls
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(package):
        return
    if code.co_qualname.endswith(("<listcomp>", "<dictcomp>", "<setcomp>")):
        return
    calls += 1
    if f"{code.co_filename.removeprefix(package)}:{code.co_qualname}" == where:
        sys.setprofile(None)
        print("calls", calls, flush=True)
        os._exit(0)

sys.setprofile(count)
cli.main(sys.argv[2:])
"""
SMALL = """
from clearhead.reproduce import requests
from tests.reproduce.smoke import experiments

requests.EXPERIMENTS = experiments()
"""
STEP = "train/parallel.py:accumulate"
SHAPE = ("--set", "hidden_size=24", "num_hidden_layers=1", "num_attention_heads=2")


@pytest.mark.parametrize(
    ("bound", "where", "words"),
    [
        (2500, STEP, ("train", "transformer", *SHAPE)),
        (4000, STEP, ("compare", "transformer", "softmax1", *SHAPE)),
        (
            5000,
            "eval/sliding.py:Losses.__call__",
            ("eval", "run", "--lengths", "16", "--tokens", "64"),
        ),
        (
            20_000,
            "experiments/processes.py:_start",
            ("reproduce", "sas/figure2", "--only", "transformer", "sas*"),
        ),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_a_verb_does_its_work_soon(bound, where, words, settings, tmp_path, monkeypatch):
    def called(*given: str) -> str:
        small = SMALL * (given[1] == "reproduce")
        line = [sys.executable, "-c", small + PROGRAM, *given]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True).stdout

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    if words[0] != "reproduce":
        texts = [
            {"text": f"attention noise sink query key value head {n} " * 40} for n in range(60)
        ]
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
        settings = changed(settings, "--data.data", "own.jsonl")
        called("none", "train", *SHAPE, *settings, "--output", "run")  # makes its tokens
    if words[0] in ("train", "compare"):
        words = (*words, *settings)
    output = "--records" if words[0] == "eval" else "--output"
    said = called(where, *words, output, "out")
    assert int(said.split("calls ")[1].split()[0]) <= bound
