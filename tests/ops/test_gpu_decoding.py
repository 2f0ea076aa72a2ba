"""Attention of a lone query on a GPU: kernels against the oracle, no copies, and CUDA graphs."""

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from clearhead import ClearheadForCausalLM, ops, preset
from clearhead.models import PRESETS
from clearhead.ops import dispatch, oracles
from clearhead.ops.requests import DIFFERENTIAL, PLAIN, UNROTATED
from clearhead.ops.visibility import Visibility

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# ‖error‖ / ‖exact‖.
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NORM = {"norm_weight": None, "norm_eps": None, "gain": 1.0}
NAMES = "split-decode,tiles"


def _mask(keys: int, padding: str) -> Tensor | None:
    at = torch.arange(keys, device="cuda").expand(2, -1)
    if padding == "whole":
        return None
    if padding == "holes":
        return at % 5 != torch.tensor([[1], [7]], device="cuda")
    first = torch.tensor([[keys // 3], [0]], device="cuda")
    return at < keys - first if padding == "right" else at >= first


def _run(
    kind: str, inputs: list[Tensor], mask: Tensor | None, sink: Tensor | None, exact: bool = False
) -> Tensor:
    """Of two texts; by the table, or, with `exact`, by the oracle."""
    q, k, v = (x.double() for x in inputs) if exact else inputs
    options = {"key_mask": mask, "sink": sink}
    attend = oracles.attend if exact else ops.attend
    if kind == PLAIN:
        return attend(q, k, v, **options)
    if kind == DIFFERENTIAL:
        lam = torch.tensor(0.37, device="cuda")
        return (oracles if exact else ops).differential(q, k, v, lam, **NORM, **options)
    counted = torch.ones(1, k.shape[2], device="cuda") if mask is None else mask
    frequency = 1e4 ** -(torch.arange(0, q.shape[3], 2, device="cuda") / q.shape[3])
    rotation = ops.Rotation(counted.cumsum(-1).long() + 2, frequency)
    scale = q.shape[3] ** -0.5
    if exact:
        k = ops.coca_keys(k, rotation.table(), "exact")
        return oracles.attend(q, k, v, scale=scale, **options)
    visibility = Visibility(True, None, mask, None)
    unrotated = {"rotation": rotation, "form": "exact", "attend": None}
    return ops.attend_unrotated(q, k, v, visibility=visibility, sink=sink, scale=scale, **unrotated)


def _inputs(kind: str, heads: int, groups: int, keys: int, width: int, dtype: torch.dtype):
    torch.manual_seed(0)
    shapes = [(2, heads, 1, width), (2, groups, keys, width), (2, groups, keys, width)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return [q, k[..., : width // 2] if kind == UNROTATED else k, v]


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, NAMES)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("kind", "padding", "keys", "number"),
    [
        (*case, number)
        for number, case in enumerate(
            product(
                [PLAIN, DIFFERENTIAL, UNROTATED], ["whole", "left", "right", "holes"], [1, 67, 4099]
            )
        )
    ],
)
def test_split_decode_matches_oracle(kind, padding, keys, number):
    """Dtypes, widths and groups take turns."""
    dtype, width = list(BOUND)[number % 3], (32, 64, 128)[number // 3 % 3]
    heads, groups = ((4, 4), (8, 2), (40, 2))[(number + number // 9) % 3]
    inputs, mask = _inputs(kind, heads, groups, keys, width, dtype), _mask(keys, padding)
    sink = torch.randn(heads, device="cuda")
    if mask is not None:  # what lies in hidden slots does not matter
        hidden = ~mask[:, None, :, None]
        inputs = [inputs[0], *(x.masked_fill(hidden, torch.nan) for x in inputs[1:])]
    got = _run(kind, inputs, mask, sink)
    clean = [x.nan_to_num() for x in inputs]
    want = _run(kind, clean, mask, sink, exact=True)
    assert (got.double() - want).norm() <= BOUND[dtype] * want.norm()


@pytest.mark.parametrize("kind", [PLAIN, DIFFERENTIAL, UNROTATED])
@pytest.mark.parametrize("padding", ["whole", "left"])
def test_grouped_queries_copy_no_cache(kind, padding):
    """By the table's own choice; less memory than a tenth of the cache."""
    inputs = _inputs(kind, 32, 4, 16_384, 64, torch.bfloat16)
    mask = _mask(16_384, padding)
    _run(kind, inputs, mask, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _run(kind, inputs, mask, None)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < sum(x.nbytes for x in inputs[1:]) / 10


@pytest.mark.parametrize("kind", [PLAIN, DIFFERENTIAL, UNROTATED])
def test_a_graph_follows_its_inputs(kind):
    inputs = _inputs(kind, 8, 2, 300, 64, torch.bfloat16)
    mask = _mask(300, "left")
    run = lambda: _run(kind, inputs, mask, None)  # noqa: E731
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        run()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run()
    inputs[0].mul_(0.5)
    mask[0, :200] = False
    graph.replay()
    assert torch.equal(o, run())


@pytest.mark.parametrize("name", ["transformer", "softmax1", "differential", "coca"])
def test_a_static_cache_generates_the_same_compiled(name):
    """As transformers compiles a step by itself on a GPU; shapes that the table's kernels take."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 64, "vocab_size": 97, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset(name, **shape)).to("cuda").eval()
    ids = torch.randint(0, 97, (2, 12), device="cuda")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "name", [name for name, keys in PRESETS.items() if keys.get("direction") != "bidirectional"]
)
@torch.no_grad()
def test_a_whole_step_in_a_graph(name, padding):
    """Captured once, it serves every later length."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 97, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset(name, **shape)).to("cuda").eval()
    ids = torch.randint(0, 97, (2, 12), device="cuda")
    mask = torch.ones(2, 16, dtype=torch.long, device="cuda")
    mask[1, :padding] = 0
    whole = model(ids, attention_mask=mask[:, :12], use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :5], attention_mask=mask, past_key_values=cache)
    given = {"attention_mask": mask if padding else None, "past_key_values": cache}
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels are chosen and compiled
        model(ids[:, 5:6], **given)
    torch.cuda.current_stream().wait_stream(aside)
    token, graph = ids[:, 6:7].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, **given).logits
    for place in range(6, 12):
        token.copy_(ids[:, place : place + 1])
        graph.replay()
        assert (logits[:, 0] - whole[:, place]).abs().max() <= 1e-3 * whole.abs().max()
