"""A step of decoding: its operations, counted, and as a CUDA graph would hold it, without a GPU.

And what a reader has to read: the way from `ClearheadForCausalLM.forward` to PyTorch's attention
by names, imports and annotations (a module leads to its class's `forward`, or its subclasses'; a
protocol to what is annotated so), and the calls and files of a forward pass.
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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import clearhead
from clearhead import ClearheadError, ClearheadForCausalLM, preset, presets
from tests.ops.stand_ins import cuda_kernels  # noqa: F401 (a fixture)

from . import space
from .space import CAUSAL, build

SHAPE: dict[str, Any] = space.SHAPE | {"hidden_size": 128, "num_key_value_heads": 4}
SHAPE |= {"head_dim": 32, "num_hidden_layers": 2}
# Of Llama's operations in a layer.
BOUND = 1.15
# Gates, summed over the keys; magnitudes and a phase of all keys; no kernel of its own.
WIDER = {"forget": 1.7, "pope": 1.35, "softpick": 1.6}


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        makes = any("Tensor" in str(each.type) for each in function._schema.returns)
        self.number += makes and not function.is_view and "view" not in function._schema.name
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def _step(model: Any) -> int:
    model, ids = model.eval(), torch.randint(0, 31, (1, 6))
    cache = model(ids, use_cache=True).past_key_values
    with _Counting() as counting:
        model(ids[:, :1], past_key_values=cache)
    return counting.number


@pytest.mark.parametrize("name", CAUSAL)
def test_a_presets_layer_takes_few_more_operations_than_llama_s(name):
    counts = {}
    for layers in (3, 4):  # the first layer may differ
        shape = SHAPE | {"num_hidden_layers": layers}
        config, ours = LlamaConfig(**shape), ClearheadForCausalLM(preset(name, **shape))
        counts[layers] = _step(LlamaForCausalLM(config)), _step(ours)
    peer, own = (after - before for before, after in zip(counts[3], counts[4], strict=True))
    print(f"{name}: {own} of {peer}")
    assert own / peer <= WIDER.get(name, BOUND)


CHANGES = {
    "in place": torch.no_grad()(lambda weight: weight.add_(0.5)),
    "assigned": lambda weight: setattr(weight, "data", weight.data + 0.5),
    # By PyTorch's counter of versions: the next text's first tokens tell.
    "unseen": lambda weight: weight.data.add_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_has_the_lambda_and_the_gain_of_the_weights(change):
    model = ClearheadForCausalLM(preset("differential", **SHAPE))
    ids, modes = torch.randint(0, 31, (1, 6)), (torch.no_grad, torch.inference_mode)
    for mode in (*modes, *modes):
        with mode():
            cache = model.eval()(ids[:, :5], use_cache=True).past_key_values
            got = model(ids[:, 5:], past_key_values=cache).logits
        want = model(ids, use_cache=False).logits[:, 5:]
        assert torch.allclose(got, want, atol=1e-5)
        maps = model.model.layers[1].self_attn.maps
        for weight in (maps.lambda_q1, maps.lambda_k1, maps.norm_weight):
            CHANGES[change](weight)


PLACES, ROOM = 12, 16  # tokens, and slots of a static cache


def _text() -> torch.Tensor:
    return torch.randint(0, 61, (2, PLACES), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "keys", "padding"),
    [
        *((name, {}, 3) for name in CAUSAL),
        *((name, {}, 0) for name in ("transformer", "differential", "coca", "forget", "sas")),
        ("transformer", {"num_key_value_heads": 2, "normalizer": "key-value"}, 0),
        ("transformer", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 3),
    ],
)
@torch.no_grad()
def test_a_step_traced_once_serves_every_later_length(name, keys, padding):
    """Over a static cache, traced with tensors that have no values: whatever reads one, or makes a
    shape of one, is an error."""
    model, ids = build(name, **keys), _text()
    mask = torch.ones(2, ROOM, dtype=torch.long)  # of all the cache's room, from the first token on
    mask[1, :padding] = 0
    whole = model(ids, attention_mask=mask[:, :PLACES], use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :5], attention_mask=mask, past_key_values=cache)
    names = "cumulative_length", "keys", "values"
    state = [tuple(getattr(layer, each) for each in names) for layer in cache.layers]
    given = mask if padding else None

    def step(token: torch.Tensor, mask: torch.Tensor | None, state: list) -> torch.Tensor:
        for layer, tensors in zip(cache.layers, state, strict=True):
            for each, tensor in zip(names, tensors, strict=True):
                setattr(layer, each, tensor)
        return model(token, attention_mask=mask, past_key_values=cache).logits[:, 0]

    trace = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = trace(ids[:, 5:6], given, state)
    for place in range(5, PLACES):
        got = graph(ids[:, place : place + 1], given, state)
        assert torch.allclose(got, whole[:, place], atol=1e-4)
    assert all(length == PLACES for length, *_ in state)


def test_the_room_of_a_cache_may_be_more_than_the_positions_but_not_its_tokens():
    model, ids = build("gpt2", max_position_embeddings=PLACES), _text()
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :11], past_key_values=cache)
    model(ids[:, 11:], past_key_values=cache)
    with pytest.raises(ClearheadError, match="13 tokens are more than the 12 positions"):
        model(ids[:, :1], past_key_values=cache)


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
