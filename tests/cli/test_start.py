"""A quick start: few modules before a verb's help, few calls of functions before its work.

The bounds go down only.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import clearhead
from clearhead.cli import VERBS
from clearhead.lab.measuring import TASKS
from clearhead.models import SIZES
from clearhead.named_models import _OWN as OWN_PRESETS
from clearhead.optim import OPTIMIZERS
from clearhead.settings.eval import OPTIONS
from clearhead.settings.recipe import Optimizer

from .conftest import SMALL, STEPS, data_of

FROZEN = json.loads(Path(__file__).with_name("frozen_options.json").read_text("utf-8"))
HEAVY = {"torch", "transformers", "datasets", "numpy", "plotly", "pandas", "tokenizers"}


PROGRAM = """
import contextlib, io, json, sys
from clearhead.cli import main
told = io.StringIO()
try:
    with contextlib.redirect_stdout(told):
        main(sys.argv[1:])
except SystemExit as stop:
    print(json.dumps([stop.code, told.getvalue(), sorted(sys.modules)]))
"""


def _run(*words: str) -> tuple[int, str, set[str]]:
    """The exit code of `clearhead WORDS` in a new process, what it prints, and its modules."""
    command = [sys.executable, "-c", PROGRAM, *words]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    code, told, modules = json.loads(ran.stdout.splitlines()[-1])
    return code, told, set(modules)


def test_the_list_of_verbs_and_that_of_experiments_need_no_heavy_library():
    assert [*FROZEN] == [*VERBS]
    for words in (["--help"], ["reproduce", "--list"]):
        code, _, modules = _run(*words)
        assert code == 0
        assert not HEAVY & modules
        assert words[1:] or not {"tyro", "rich"} & modules


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_needs_few_modules_has_two_examples_and_names_what_an_option_holds(verb):
    code, told, modules = _run(verb, "--help")
    assert code == 0
    assert not HEAVY & modules
    ours = sorted(name for name in modules if name.partition(".")[0] == "clearhead")
    assert len(ours) <= 35, ours
    assert len(re.findall(rf"^  clearhead {verb}(?: .*)?$", told, flags=re.MULTILINE)) >= 2
    # Every option is frozen by name: one that goes is named in CHANGELOG.md.
    rows = re.findall(r"^[│ ] (-[^\s,]+(?:, -[^\s,]+)*)", told, re.MULTILINE)
    assert sorted({name for row in rows for name in row.split(", ")}) == FROZEN[verb]
    assert "{None}" not in told
    assert not re.search(r"\bSTR\b", told)
    if verb in ("train", "plan", "compare"):
        assert {*SIZES, *OWN_PRESETS} <= {*told.split()}


def test_names_of_the_package_are_those_of_their_homes():
    assert clearhead.preset is clearhead.models.preset
    with pytest.raises(AttributeError, match="module 'clearhead' has no attribute 'presett'"):
        clearhead.presett  # noqa: B018


def test_what_is_written_out_for_the_sake_of_a_quick_help_is_what_there_is():
    assert get_args(Optimizer) == tuple(OPTIMIZERS)
    assert {*OPTIONS} == {*TASKS}
    assert all(issubclass(TASKS[name], kind) for name, kind in OPTIONS.items())


# Counts calls of functions of the package until WHERE is called; comprehensions are none of them,
# since later versions of Python inline them.
CALLS = """
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
SMOKE = """
import sys
import tests.architectures
from clearhead.papers import requests

sys.modules["tests_architectures"] = tests.architectures
from tests.papers.test_smoke import experiments

requests.EXPERIMENTS = experiments()
"""
STEP = "train/parallel.py:accumulate"
SHAPE = ("--set", *SMALL)


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
        steps = (*data_of("own.jsonl"), *STEPS, "--data.vocabulary", "300")
        settings = steps * (verb in ("train", "compare"))
        output = "--records" if verb == "eval" else "--output"
        code = SMOKE * (verb == "reproduce") + CALLS
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
            "eval/sliding.py:logits_of",
            ("eval", "train-none", "--lengths", "16", "--tokens", "64"),
        ),
        (
            20_000,
            "lab/processes.py:start",
            ("reproduce", "sas/figure2", "--only", "transformer", "sas*"),
        ),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_a_verb_does_its_work_soon(bound, where, words, called):
    said = called(where, *words)
    assert int(said.split("calls ")[1].split()[0]) <= bound
