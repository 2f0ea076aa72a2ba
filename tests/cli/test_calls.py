"""Calls of the package before the work of a verb begins: bounds that go down only."""

import json
import os
import sys

import pytest

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
from clearhead.papers import requests
from tests.papers.smoke import experiments

requests.EXPERIMENTS = experiments()
"""
STEPS = (
    *("--data.validation", "0.1", "--train.tokens", "64", "--train.sequence-length", "16"),
    *("--train.batch-size", "2", "--train.precision", "fp32"),
)
STEP = "train/parallel.py:accumulate"
SHAPE = ("--set", "hidden_size=24", "num_hidden_layers=1", "num_attention_heads=2")


TEXT = ("--data.data", "own.jsonl")


@pytest.fixture(scope="module")
def called(warm, cache, tmp_path_factory):
    """called(where, verb, …) says how often functions were called, in a folder with a run."""
    folder = tmp_path_factory.mktemp("called")
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths, "CLEARHEAD_CACHE": str(cache)}
    texts = [{"text": f"attention noise sink query key value head {n} " * 40} for n in range(60)]
    (folder / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    os.utime(folder / "own.jsonl", (0, 0))  # a text that is new is read again

    def run(where, verb, *words):
        settings = (*STEPS, *TEXT, "--data.vocabulary", "300") * (verb in ("train", "compare"))
        output = "--records" if verb == "eval" else "--output"
        code = SMALL * (verb == "reproduce") + PROGRAM
        out = (output, f"{verb}-{where[:4]}")
        return warm.run(
            "-c", code, where, verb, *words, *settings, *out, cwd=folder, env=environment
        ).stdout

    run("none", "train", *SHAPE)  # makes the tokens of the others
    return run


@pytest.mark.parametrize(
    ("bound", "where", "words"),
    [
        (2500, STEP, ("train", "transformer", *SHAPE)),
        (4000, STEP, ("compare", "transformer", "softmax1", *SHAPE)),
        (
            5000,
            "eval/sliding.py:Losses.__call__",
            ("eval", "train-none", "--lengths", "16", "--tokens", "64"),
        ),
        (
            20_000,
            "lab/processes.py:_start",
            ("reproduce", "sas/figure2", "--only", "transformer", "sas*"),
        ),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_a_verb_does_its_work_soon(bound, where, words, called):
    said = called(where, *words)
    assert int(said.split("calls ")[1].split()[0]) <= bound
