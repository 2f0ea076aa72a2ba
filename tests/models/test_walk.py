"""What a reader has to read: the way from `ClearheadForCausalLM.forward` to PyTorch's attention,
and the calls and files of a forward pass.

For the way nothing is run: a call is followed by names, imports and annotations. A module that is
called leads to its class's `forward`, or its subclasses'; a protocol to the functions that are
annotated so.
"""

import ast
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import clearhead
from clearhead import presets

from .space import build

HOME = Path(clearhead.__file__).parent
GOAL = "torch.nn.functional.scaled_dot_product_attention"
NODES: dict[str, Any] = {}  # functions, classes and methods of the package, by dotted name
IMPORTS: dict[str, str] = {}
MODULE: dict[str, str] = {}  # of a function, class or method

for path in HOME.rglob("*.py"):
    module = ".".join(path.relative_to(HOME.parent).with_suffix("").parts)
    module = module.removesuffix(".__init__")
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            IMPORTS |= {f"{module}.{a.asname or a.name}": origin + a.name for a in node.names}
    for node in (each for each in tree.body if hasattr(each, "name")):
        own = {node.name: node}
        if isinstance(node, ast.ClassDef):
            own |= {f"{node.name}.{m.name}": m for m in node.body if hasattr(m, "name")}
        NODES |= {f"{module}.{name}": each for name, each in own.items()}
        MODULE |= dict.fromkeys([f"{module}.{name}" for name in own], module)


def _named(expression: ast.AST | None, scope: str) -> str:
    """The dotted name of an expression as a module means it; "" of one that is no name."""
    if isinstance(expression, ast.Subscript):  # Sequence[Block]
        return _named(expression.slice, scope)
    if isinstance(expression, ast.Attribute):
        name = f"{_named(expression.value, scope)}.{expression.attr}"
    else:
        name = f"{scope}.{expression.id}" if isinstance(expression, ast.Name) else ""
    while name in IMPORTS:  # also through a package that passes it on
        name = IMPORTS[name]
    return name


def _bases(owner: str) -> list[str]:
    return [_named(base, MODULE[owner]) for base in getattr(NODES[owner], "bases", ())]


def _member(owner: str, name: str) -> str:
    """A method, or the class by which a module or function is held in an attribute; "" for none."""
    if f"{owner}.{name}" in NODES:
        return f"{owner}.{name}"
    for node in ast.walk(NODES[owner]):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        declared = node in NODES[owner].body and getattr(target, "id", None) == name
        if declared or getattr(target, "attr", None) == name:
            made = getattr(node.value, "func", None)
            return _named(getattr(node, "annotation", made), MODULE[owner])
    return next(
        (held for base in _bases(owner) if base in NODES and (held := _member(base, name))), ""
    )


def _values(expression: ast.AST, owner: str, function: str) -> Iterator[str]:
    """Functions and classes that an expression may stand for within a function."""
    if isinstance(expression, ast.Attribute) and getattr(expression.value, "id", None) == "self":
        yield _member(owner, expression.attr)
        return
    yield _named(expression, MODULE[function])
    if not isinstance(expression, ast.Name):
        return
    for node in ast.walk(NODES[function]):  # a local, or the target of a loop over zip(…)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == expression.id:
            if isinstance(node.value, ast.Attribute):
                yield from _values(node.value, owner, function)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            for target, each in zip(node.target.elts, getattr(node.iter, "args", ()), strict=False):
                if getattr(target, "id", None) == expression.id:
                    yield from _values(each, owner, function)


def _run(value: str) -> Iterator[str]:
    """The functions that run where a value is called."""
    if not isinstance(NODES.get(value), ast.ClassDef):
        yield value
        return
    yield _member(value, "forward")
    for name, node in NODES.items():
        if isinstance(node, ast.ClassDef):
            if value in _bases(name):
                yield f"{name}.forward"
            for each in node.body:  # attend: Attend = staticmethod(attend)
                typed = isinstance(each, ast.AnnAssign) and isinstance(each.value, ast.Call)
                if typed and _named(each.annotation, MODULE[name]) == value:
                    yield from (_named(one, MODULE[name]) for one in each.value.args)


def _ways(start: str) -> dict[str, list[str]]:
    """Every function that is reached, with the shortest way to it."""
    ways, queue = {start: [start]}, deque([start])
    while queue:
        function = queue.popleft()
        if not isinstance(NODES.get(function), ast.FunctionDef):
            continue
        owner = function.rpartition(".")[0]
        calls = (node for node in ast.walk(NODES[function]) if isinstance(node, ast.Call))
        for call in calls:
            for value in _values(call.func, owner, function):
                for name in _run(value):
                    if name not in ways:
                        ways[name] = [*ways[function], name]
                        queue.append(name)
    return ways


def test_the_source_leads_to_pytorchs_attention():
    start = _member("clearhead.models.language_models.ClearheadForCausalLM", "forward")
    ways = _ways(start)
    assert ways[GOAL] == [
        "clearhead.models.language_models.LanguageModel.forward",
        "clearhead.models.base_model.ClearheadModel.forward",
        "clearhead.nn.block.PreNorm.forward",
        "clearhead.nn.block.Block.attention",
        "clearhead.nn.attention.Attention.forward",
        "clearhead.ops.attention.attend",
        "clearhead.ops.cuda_sdpa.attend",
        GOAL,
    ]
    blocks = ["AttentionSkip", "Parallel", "PreNorm", "SAS", "SASP", "Skipless"]
    assert ways.keys() >= {f"clearhead.nn.block.{name}.forward" for name in blocks}


def _calls(name: str) -> list[str]:
    """The file of each call of ours."""
    model, ids = build(name, num_hidden_layers=1).train(), torch.randint(0, 61, (2, 9))
    model(input_ids=ids, labels=ids)  # kernels are chosen at the first call
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(HOME)):
            calls.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model(input_ids=ids, labels=ids)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer is at work")
def test_a_forward_pass_makes_few_calls_in_few_files():
    calls = {name: _calls(name) for name in presets()}
    counts = {name: len(own) for name, own in calls.items()}
    files = {name: len(set(own)) for name, own in calls.items()}
    assert statistics.median(counts.values()) <= 61, counts
    assert counts["transformer"] <= 51, counts
    assert statistics.median(files.values()) <= 15, files
    assert files["transformer"] <= 13, files
