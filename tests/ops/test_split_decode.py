"""Attention of a lone query by split keys, in Triton's interpreter (`make kernels`).

Outputs against float64 oracles.

On a GPU, `test_gpu.py` runs the kernels compiled.
"""

import os

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from benchmarks import dispatch_table
from clearhead import ClearheadForCausalLM, ops, preset
from clearhead.ops import dispatch, self_test, split_decode
from clearhead.ops.requests import DIFFERENTIAL, PLAIN, UNROTATED
from clearhead.ops.visibility import Visibility
from tests.ops import oracles

# Where it is asked for and Triton is missing, these fail.
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="`make kernels` runs these; CPU builds of PyTorch lack Triton",
)
# ‖error‖ / ‖exact‖.
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
KINDS = [PLAIN, DIFFERENTIAL, UNROTATED]
THETA = 10_000.0
NORM = {"norm_weight": None, "norm_eps": None, "gain": 1.0}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """The table's entry for a CPU, named by the environment; products of bfloat16 as they are.

    Triton's interpreter would multiply bfloat16 by its bits.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return product(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    kernel = dispatch.KERNELS["split-decode"]._replace(device="cpu")
    monkeypatch.setitem(dispatch.KERNELS, "split-decode", kernel)
    monkeypatch.setenv(dispatch.VARIABLE, "split-decode,products,tiles")
    monkeypatch.setattr(split_decode, "_processors", lambda x: 3)
    dispatch._chosen.cache_clear()
    yield
    dispatch._chosen.cache_clear()


def _compare(
    kind: str,
    *,
    heads: int = 4,
    groups: int = 4,
    keys: int = 67,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    sink: float | Tensor | None = None,
    mask: Tensor | None = None,
    spread: float = 1.0,
    shift: float = 0.0,
    form: str = "exact",
    start: int = 3,
    layout=lambda x: x,
    times: float = 1.0,
) -> None:
    """times: the bound, where a float32 score or angle is itself rounded to more."""
    q, k, v = (torch.randn(2, n, s, width) for n, s in ((heads, 1), (groups, keys), (groups, keys)))
    q, k = q * spread, k * spread
    q[..., 0], k[..., 0] = width**0.5, shift  # moves every logit, to where the sink matters
    if kind == UNROTATED:
        k = k[..., : width // 2]
    if form == "strict":
        q = q[..., : width // 2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    exact = [x.double() for x in (q, k, v)]
    if mask is not None:  # what lies in hidden slots does not matter
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    options = {"sink": sink, "key_mask": mask}
    q, k, v = layout(q), layout(k), layout(v)
    if kind == PLAIN:
        got, want = ops.attend(q, k, v, **options), oracles.attend(*exact, **options)
    elif kind == DIFFERENTIAL:
        lam = torch.tensor(0.37)
        got = ops.differential(q, k, v, lam, **NORM, **options)
        want = oracles.differential(*exact, lam.double(), **NORM, **options)
    else:
        got, want = _collinear((q, k, v), exact, form, start, **options)
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert (got.double() - want).norm() <= times * BOUND[dtype] * want.norm().clamp_min(1e-30)


def _collinear(inputs, exact, form, start, sink, key_mask) -> tuple[Tensor, Tensor]:
    """The kernel's, and softmax over the N × N × D scores of the paper."""
    q, t, v = inputs
    width, keys = 2 * t.shape[-1], t.shape[2]
    frequency = THETA ** -(torch.arange(0, width, 2) / width)
    counted = torch.ones(1, keys) if key_mask is None else key_mask
    positions = counted.cumsum(-1).long() - 1 + start
    own = positions[:, -1:]
    visibility = Visibility(True, None, key_mask, None)
    got = ops.attend_unrotated(
        *(ops.coca_queries(q, ops.rotary_table(own, frequency), form), t, v),
        **{"rotation": ops.Rotation(positions, frequency), "form": form, "attend": None},
        **{"visibility": visibility, "sink": sink, "scale": width**-0.5},
    )
    places = (own.expand(2, -1), positions.expand(2, -1))
    score = oracles.coca_scores(exact[0], exact[1], *places, THETA, form) * width**-0.5
    if key_mask is not None:
        score = score.masked_fill(~key_mask[:, None, None], -torch.inf)
    null = score.new_full((*score.shape[:3], 1), -torch.inf if sink is None else 0.0)
    if sink is not None:
        null = null + (sink[:, None, None] if isinstance(sink, Tensor) else sink)
    weight = torch.cat([score, null], -1).softmax(-1)[..., :keys].nan_to_num()
    return got, weight @ exact[2].repeat_interleave(q.shape[1] // t.shape[1], 1)


@pytest.mark.parametrize("keys", [1, 7, 32, 67, 150])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_oracle(kind, keys):
    _compare(kind, keys=keys)


@pytest.mark.parametrize("processors", [1, 2, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_any_number(kind, processors, monkeypatch):
    """One part, several blocks each, and as many as there are blocks."""
    monkeypatch.setattr(split_decode, "_processors", lambda x: processors)
    _compare(kind, keys=150, sink=0.0)
    _compare(kind, keys=3)


def test_parts_are_whole_blocks_and_no_more_than_the_second_kernel_holds():
    for programs in (1, 8, 5000):
        for keys in (1, 33, 4096, 65_537, 10**6):
            part = split_decode.part_of(programs, keys, 32, 132)
            assert part % 32 == 0
            assert -(-keys // part) <= split_decode.MOST_PARTS
    assert split_decode.part_of(5000, 4096, 32, 132) == 4096


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (12, 4), (40, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries(kind, heads, groups):
    _compare(kind, heads=heads, groups=groups, sink=torch.randn(heads))


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_whose_slots_hold_anything(kind, padding, make_masks):
    """Positions with holes are turned key by key."""
    _compare(kind, keys=150, mask=make_masks(150, padding, False)["key_mask"], sink=0.0)


@pytest.mark.parametrize("sink", [None, 0.0])
@pytest.mark.parametrize("kind", [PLAIN, DIFFERENTIAL])
def test_a_row_without_a_key_gets_zeros(kind, sink):
    mask = torch.ones(2, 67, dtype=torch.bool)
    mask[0] = False
    _compare(kind, mask=mask, sink=sink)


@pytest.mark.parametrize("sink", [None, 0.0, "learned"])
@pytest.mark.parametrize(("spread", "shift"), [(6.0, 0.0), (1.0, -40.0), (1.0, 60.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_far_from_zero(kind, spread, shift, sink):
    sink = torch.randn(4) if sink == "learned" else sink
    spread = spread if kind != UNROTATED else 2.0  # its queries are squared
    _compare(kind, spread=spread, shift=shift, sink=sink, times=10)


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_widths_and_dtypes(kind, dtype, width):
    _compare(kind, dtype=dtype, width=width, keys=40)


@pytest.mark.parametrize("form", ["exact", "strict", "slack"])
@pytest.mark.parametrize("start", [0, 4000])
def test_collinear_forms(form, start):
    """Far from the beginning: products of positions and frequencies wrap as angles do."""
    _compare(UNROTATED, form=form, start=start, width=64, times=100 if start else 2)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ],
    ids=["tokens first", "cut rows", "every second"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind, layout):
    _compare(kind, layout=layout)


def test_yarn_and_frequencies_by_text():
    """A factor of the tables, and a base of each text's own, as dynamic scaling has it."""
    q, t, v = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 32)
    frequency = torch.tensor([[1e4], [5e5]]) ** -(torch.arange(0, 32, 2) / 32)
    rotation = ops.Rotation(torch.arange(70)[None] + 40, frequency, 1.3)
    options = {"form": "exact", "sink": 0.0, "scale": 0.2, "visibility": Visibility()}

    def plain(*inputs: Tensor, visibility: Visibility, **options: object) -> Tensor:
        return oracles.attend(*inputs, **visibility._asdict(), **options)

    inputs = {"rotation": rotation, "attend": plain}
    got = ops.attend_unrotated(q, t, v, **inputs, **options)
    k = ops.coca_keys(t, rotation.table(), "exact")
    want = plain(q, k, v, visibility=Visibility(), sink=0.0, scale=0.2)
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_passes_its_test_on_a_device(kind, padded):
    asked = dispatch_table.PLAIN._replace(
        lone=True, square=False, causal=False, learning=False, key_mask=padded, kind=kind, shared=2
    )
    kernel = dispatch.KERNELS["split-decode"]
    assert kernel.run.refuses(asked) is None
    assert self_test.failure(kernel.run, asked) is None


def test_the_operator_keeps_pytorch_s_contract():
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 40, 32)
    mask = torch.ones(1, 40, dtype=torch.bool)
    for lam in (None, torch.tensor(0.2)):
        torch.library.opcheck(
            split_decode._decode, (q, k, k.clone(), lam, None, mask, None, None, 0.25)
        )


@pytest.mark.parametrize("name", ["transformer", "differential", "coca", "softmax1", "sink"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_model_decodes_the_same(name, padded, monkeypatch):
    """Dynamic and static caches, grouped queries; and only a lone query is decoded so."""
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 32, "vocab_size": 31, "num_hidden_layers": 2}
    model = ClearheadForCausalLM(preset(name, **shape)).eval()
    ids, mask = torch.randint(0, 31, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 1 - padded
    want = model(ids, attention_mask=mask, use_cache=False).logits[:, -3:]
    calls = []
    launch = split_decode._decode
    monkeypatch.setattr(split_decode, "_decode", lambda *a: calls.append(a) or launch(*a))
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=20)):
        calls.clear()
        model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
        assert not calls
        for at in (9, 10, 11):
            step = {"attention_mask": mask[:, : at + 1], "past_key_values": cache}
            logits = model(ids[:, at : at + 1], **step).logits
            assert (logits[:, 0] - want[:, at - 9]).abs().max() < 2e-5 * want.abs().max()
        assert len(calls) == 6
