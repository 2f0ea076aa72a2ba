"""A quick start: a verb's help imports what it parses, and no more; generating imports a part."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from typing import get_args

import pytest

import clearhead
from clearhead.cli import VERBS
from clearhead.eval import TASKS
from clearhead.eval.options import OPTIONS
from clearhead.models import SIZES
from clearhead.named_models import _OWN as OWN_PRESETS
from clearhead.optim import OPTIMIZERS
from clearhead.optim.recipe import Optimizer

HEAVY = {"torch", "transformers", "datasets", "numpy", "plotly", "pandas", "tokenizers"}
ROOMS = (
    *("data", "diagnose", "eval", "models", "optim", "probe", "quantize", "report", "train"),
    "view",
)


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
    assert "{None}" not in told
    assert not re.search(r"\bSTR\b", told)
    if verb in ("train", "plan", "compare"):
        assert {*SIZES, *OWN_PRESETS} <= {*told.split()}


def test_importing_the_package_is_light_and_its_names_are_those_of_their_homes():
    command = [sys.executable, "-c", "import sys, clearhead; print(*sys.modules)"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert not HEAVY & {*ran.stdout.split()}
    assert clearhead.preset is clearhead.models.preset
    with pytest.raises(AttributeError, match="module 'clearhead' has no attribute 'presett'"):
        clearhead.presett  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_of_a_room_is_found_and_none_is_a_module_too(room):
    package = importlib.import_module(f"clearhead.{room}")
    modules = {one.name for one in pkgutil.iter_modules(package.__path__)}
    assert not modules & {*package.__all__}  # the import of the module would hide the name
    assert all(hasattr(package, name) for name in package.__all__)


def test_what_is_written_out_for_the_sake_of_a_quick_help_is_what_there_is():
    assert get_args(Optimizer) == tuple(OPTIMIZERS)
    assert {*OPTIONS} == {*TASKS}
    assert all(issubclass(TASKS[name], kind) for name, kind in OPTIONS.items())
