"""The experiments as code: one short function each, that says what it changes."""

import ast
from pathlib import Path

import pytest

import clearhead.reproduce
from clearhead.reproduce import EXPERIMENTS, Experiment

FOLDER = Path(clearhead.reproduce.__file__).parent


@pytest.mark.parametrize("study", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_an_experiment_is_one_short_function_that_marks_its_intervention(study: Experiment) -> None:
    module, _, name = study.function.rpartition(".")
    source = (FOLDER / f"{module}.py").read_text("utf-8")
    functions = (one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef))
    (function,) = (one for one in functions if one.name == name)
    assert function.end_lineno is not None
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    assert len(lines) < 60
    assert any("intervention" in line.lower() for line in lines)
