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
from clearhead.cli import VERBS, main
from clearhead.eval import TASKS
from clearhead.eval.options import OPTIONS
from clearhead.models import SIZES
from clearhead.named_models import _OWN as OWN_PRESETS
from clearhead.optim import OPTIMIZERS
from clearhead.optim.recipe import Optimizer

HEAVY = {"torch", "transformers", "datasets", "numpy", "plotly", "pandas", "tokenizers"}
ROOMS = (
    "data",
    "diagnose",
    "eval",
    "models",
    "optim",
    "probe",
    "quantize",
    "report",
    "train",
    "view",
)


def _modules(*words: str) -> tuple[int, set[str]]:
    """The exit code of `clearhead WORDS` in a new process, and the modules that it imported."""
    code = (
        "import contextlib, io, json, sys\n"
        "from clearhead.cli import main\n"
        "try:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    print(json.dumps([stop.code, sorted(sys.modules)]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], check=True, capture_output=True, text=True
    )
    code, modules = json.loads(ran.stdout.splitlines()[-1])
    return code, set(modules)


def _ours(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "clearhead")


@pytest.mark.parametrize("words", [(), *((verb,) for verb in VERBS)], ids=" ".join)
def test_help_needs_no_heavy_library_and_few_modules(words):
    code, modules = _modules(*words, "--help")
    assert code == 0
    assert not HEAVY & modules
    assert words or not {"tyro", "rich"} & modules
    assert len(_ours(modules)) <= 35, _ours(modules)


def test_listing_every_experiment_with_its_cost_makes_no_model():
    code, modules = _modules("reproduce", "--list")
    assert code == 0
    assert not HEAVY & modules


def test_importing_the_package_is_light_and_its_names_are_those_of_their_homes():
    ran = subprocess.run(
        [sys.executable, "-c", "import sys, clearhead; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
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


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_two_examples_and_names_what_an_option_holds(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    told = capsys.readouterr().out
    examples = re.findall(rf"^  clearhead {verb}(?: .*)?$", told, flags=re.MULTILINE)
    assert len(examples) >= 2
    assert "{None}" not in told
    assert not re.search(r"\bSTR\b", told)


def test_what_is_written_out_for_the_sake_of_a_quick_help_is_what_there_is(capsys):
    for verb in ("train", "plan", "compare"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        told = capsys.readouterr().out.split()
        assert {*SIZES, *OWN_PRESETS} <= {*told}
    assert get_args(Optimizer) == tuple(OPTIMIZERS)
    assert {*OPTIONS} == {*TASKS}
    assert all(issubclass(TASKS[name], kind) for name, kind in OPTIONS.items())
