"""Fused differential attention V1 in Triton's interpreter, `make kernels`, against the oracle.

On a GPU, `test_gpu.py` runs the kernels compiled.
"""

import os

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadForCausalLM, preset
from clearhead.ops import differential_fused, dispatch, oracles
from clearhead.ops.visibility import Visibility

# Where it is asked for and Triton is missing, these fail.
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="`make kernels` runs these; CPU builds of PyTorch lack Triton",
)
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}
NAMES = ("o", "dq", "dk", "dv", "dlambda", "dsink")


def _compare(
    *,
    heads: int = 4,
    groups: int = 4,
    queries: int = 67,
    keys: int | None = None,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    sink: float | str | None = None,
    layout=lambda x: x,
    spread: float = 1.0,
    **seen: object,
) -> None:
    torch.manual_seed(0)
    keys = keys or queries
    shapes = [(2, heads, queries, width), (2, groups, keys, width), (2, groups, keys, width)]
    inputs = [layout(torch.randn(s).mul(spread).to(dtype)).requires_grad_() for s in shapes]
    inputs.append(torch.tensor(0.37, requires_grad=True))
    if sink == "learned":
        inputs.append(torch.randn(heads, requires_grad=True))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    sinks = [x[4] if sink == "learned" else sink for x in (inputs, exact)]
    scale = width**-0.5
    got = differential_fused.difference(
        *inputs[:4], sink=sinks[0], scale=scale, visibility=Visibility(**seen)
    )
    want = oracles.differential(
        *exact[:4],
        **{"norm_weight": None, "norm_eps": None, "gain": 1.0, "sink": sinks[1], "scale": scale},
        **seen,
    )
    assert got.dtype == dtype
    grad = torch.randn_like(want).to(dtype)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    for name, a, b in zip(NAMES, found, expected, strict=False):
        # Sums of much that cancels, λ's gradient above all, may be small beside their terms.
        bound = BOUND[dtype] * (5 if name in ("dlambda", "dsink") else 1)
        size = b.norm().clamp_min(grad.double().norm() / 10)
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= bound * size, name


@pytest.mark.parametrize("queries", [1, 7, 64, 67, 150])
@pytest.mark.parametrize("causal", [True, False])
def test_matches_oracle(queries, causal):
    _compare(queries=queries, causal=causal)


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("sink", [None, 0.0, "learned"])
def test_widths_and_sinks(width, sink):
    """128 splits the value's columns, and the maps, over two programs."""
    _compare(width=width, sink=sink)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_half_precision(spread):
    """The interpreter multiplies bfloat16 by its bits: only a GPU can show that."""
    _compare(dtype=torch.float16, spread=spread)


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (12, 4)])
@pytest.mark.parametrize("width", [16, 128])
def test_grouped_queries(heads, groups, width):
    _compare(heads=heads, groups=groups, queries=40, width=width, sink="learned")


@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_queries_are_the_last_of_the_keys(queries, window):
    _compare(queries=queries, keys=90, window=window)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("sink", [None, 0.0])
def test_padding_and_documents(make_masks, padding, documents, sink):
    _compare(queries=90, sink=sink, **make_masks(90, padding, documents))


def test_a_window_over_documents(make_masks):
    _compare(queries=90, window=13, sink="learned", **make_masks(90, "left", True))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ],
    ids=["tokens first", "cut rows", "every second"],
)
def test_strides(layout):
    _compare(layout=lambda x: layout(x).detach())


def test_an_expanded_gradient_and_the_same_result_every_time():
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    lam = torch.tensor(0.2)
    runs: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        o = differential_fused.difference(q, k, v, lam, scale=0.25, visibility=Visibility())
        runs.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_operators_keep_pytorch_s_contract():
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    lam = torch.tensor(0.2, requires_grad=True)
    sink = torch.zeros(2, requires_grad=True)
    rest = (None, None, True, 20, 0.25)
    torch.library.opcheck(differential_fused._forward, (q, k, v, lam, sink, *rest))


@pytest.mark.parametrize("changes", [{}, {"normalizer": "sink"}])
def test_a_model_learns_the_same_from_the_kernels(changes, monkeypatch):
    """With padding; and only where the environment names them."""
    changes = changes | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    changes |= {"intermediate_size": 32, "vocab_size": 31}
    model = ClearheadForCausalLM(preset("differential", **changes)).train()
    ids, mask = torch.randint(0, 31, (2, 25)), torch.ones(2, 25, dtype=torch.long)
    mask[0, :6] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def run() -> list[Tensor]:
        loss = model(ids, attention_mask=mask, labels=labels).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    want = run()
    calls = []
    difference = differential_fused.difference
    monkeypatch.setattr(
        differential_fused, "difference", lambda *a, **o: calls.append(o) or difference(*a, **o)
    )
    monkeypatch.setattr(differential_fused, "refuses", lambda *request: None)
    run()
    assert not calls
    monkeypatch.setenv(dispatch.VARIABLE, "differential-fused")
    got = run()
    assert len(calls) == 2
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-4 * max(b.norm(), 1e-2)
