"""Positions against transformers' frequencies, reference values and oracles; CoCA; forget gates."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from clearhead import ops
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import agree

CPU = torch.device("cpu")
TRAINED = 512


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=["linear", "yarn", "yarn-ramp", "yarn-mscale", "yarn-factor", "llama3"],
)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_are_transformers(scaling, theta):
    rope = {"rope_theta": theta, **scaling}
    if scaling["rope_type"] != "linear":
        rope["original_max_position_embeddings"] = TRAINED
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    want, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, CPU)
    got, factor = ops.frequencies(rope, 64, CPU)
    assert torch.allclose(got, want, rtol=2e-6)
    assert factor == pytest.approx(attention_factor)


@pytest.mark.parametrize("length", [1, 512, 513, 1024, 5000])
def test_dynamic_frequencies_are_transformers(length):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
    )
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=length)
    theta = ops.dynamic_theta(10_000.0, 4.0, 64, torch.tensor(length), 512)
    assert torch.allclose(ops.frequencies(rope, 64, CPU, theta)[0], want, rtol=1e-5)


def test_reference_values_of_ntk():
    for factor, base in ((2, 20452.23), (4, 41829.37), (8, 85550.38), (16, 174969.59)):
        assert ops.ntk_theta(10_000, factor, 64) == pytest.approx(base, abs=0.01)
    lengths = torch.tensor([1, 512, 513, 1024, 2048, 4096, 8192, 16384, 32768])
    bases = [1e4, 1e4, 10080.66, 52664.43, 141213.76, 323275.0, 696500.0, 1460670.5, 3024409.1]
    got = ops.dynamic_theta(10_000.0, 4.0, 64, lengths, 512)
    assert got.tolist() == pytest.approx(bases, rel=2e-6)


def test_slopes():
    eighths = [2.0**-h for h in range(1, 9)]
    for slopes in (
        *(eighths, [2 ** (-h / 2) for h in range(1, 17)], [2.0**-8]),
        [*eighths, 0.707107, 0.353553, 0.176777, 0.088388],
        [0.25, 0.0625, 0.015625, 0.003906, 0.5, 0.125],
    ):
        assert ops.alibi_slopes(len(slopes)).tolist() == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("start", [0, 16_000, 65_000])
def test_columns_carry_the_distance_in_every_dtype(heads, dtype, start):
    """The product of the rounded columns, summed as a kernel would, is −slope · (i − j)."""
    at = torch.arange(start, start + 300)[None]
    q, k = ops.alibi_columns(at, at, ops.alibi_slopes(heads), 32**-0.5)
    for columns in (q, k):
        # float16 may be short of range, not of digits.
        assert torch.equal(columns.bfloat16().float(), columns)
    got = (q.to(dtype).double() @ k.to(dtype).double().mT) * 32**-0.5
    want = oracles.alibi_bias(at, at, heads)
    # c = slope √D keeps 16 bits, c · i 24; float16's smallest numbers lose more.
    bound = (
        want.abs() * 2**-16 + (start + 300) * 2**-22 + (1e-2 if dtype == torch.float16 else 1e-6)
    )
    assert ((got - want).abs() <= bound).all()


def test_maps_of_one_head_share_its_slope():
    q = torch.randn(1, 8, 5, 4)
    at = torch.arange(5)[None]
    columns, _ = ops.alibi_columns(at, at, ops.alibi_slopes(4), 0.5)
    joined = ops.with_columns(q, columns)[..., 4:]
    assert torch.equal(joined[:, 0::2], columns)
    assert torch.equal(joined[:, 1::2], columns)


@pytest.mark.parametrize("centre", [0, 50, 8000])
def test_xpos_scores_match_their_oracle_whatever_the_centre(centre):
    q, k = torch.randn(2, 2, 3, 9, 16)
    at = torch.stack([torch.arange(9), torch.arange(9) * 50 + 100])
    frequency, _ = ops.frequencies({"rope_type": "default", "rope_theta": 1e4}, 16, CPU)
    tables = ops.xpos_tables(at, at, frequency, centre)
    got = ops.rotate(q, tables[0]).double() @ ops.rotate(k, tables[1]).double().mT
    want = oracles.xpos_scores(q, k, at, at, 1e4)
    past = torch.ones(9, 9).tril().bool()
    assert ((got - want)[..., past].abs() / want[..., past].abs().max()).max() < 1e-4


def test_xpos_neither_overflows_nor_vanishes_in_bfloat16_at_16k():
    at = torch.tensor([[0, 1, 8191, 8192, 16382, 16383]])
    frequency, _ = ops.frequencies({"rope_type": "default", "rope_theta": 1e4}, 64, CPU)
    for cos, sin in ops.xpos_tables(at, at, frequency, 8192):
        scale = (cos.bfloat16().float() ** 2 + sin.bfloat16().float() ** 2).sqrt()
        assert scale.isfinite().all()
        assert (scale > 1e-10).all()
        assert scale.max() < 1e10


FORMS = ["exact", "strict", "slack"]
THETA = 10_000.0


def _table(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rope = {"rope_type": "default", "rope_theta": THETA}
    return ops.rotary_table(positions, ops.frequencies(rope, width, positions.device)[0])


def _queries_and_keys(form: str, groups: int) -> list[Tensor]:
    q, t = torch.randn(2, 4, 9, 4 if form == "strict" else 8), torch.randn(2, groups, 9, 4)
    return [x.double().requires_grad_() for x in (q, t)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scores_and_gradients_are_the_papers_n_n_d_products(form, groups):
    q, t = _queries_and_keys(form, groups=groups)
    at = torch.stack([torch.arange(9), torch.arange(9) * 3 + 2])
    table = _table(at, 8)
    k = ops.coca_keys(t, table, form).repeat_interleave(4 // groups, 1)
    want = oracles.coca_scores(q, t, at, at, THETA, form)
    agree(ops.coca_queries(q, table, form) @ k.mT, want, [q, t], bound=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_rounds_once(form):
    """A = q² would overflow float16 at |q| = 181 before the score does; squares are float32."""
    q, t = (x.detach().float() for x in _queries_and_keys(form, groups=4))
    at = torch.arange(9)[None]
    table = _table(at, 8)
    exact = ops.coca_queries(q, table, form)
    rounded = ops.coca_queries(q.bfloat16(), table, form)
    assert rounded.dtype == torch.bfloat16
    once = ops.coca_queries(q.bfloat16().float(), table, form).bfloat16()
    assert torch.equal(rounded, once)
    assert torch.equal(ops.coca_keys(t.bfloat16(), table, form).float() * 0, exact * 0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("form", ["exact", "strict", "slack"])
@torch.no_grad()
def test_a_lone_query_turns_no_key_on_a_cpu(form, padded, dtype, bound):
    """Grouped queries, a sink, keys that a cache has dropped; nothing else is asked to attend."""
    q = torch.randn(2, 6, 1, 8 if form == "strict" else 16)
    t, v = torch.randn(2, 3, 9, 8).to(dtype), torch.randn(2, 3, 9, 16).to(dtype)
    positions, sink = torch.arange(12).expand(2, -1), torch.randn(6)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rotation = ops.Rotation(positions, ops.frequencies(rope, 16, positions.device)[0], 1.1)
    tilde = ops.coca_queries(
        q.to(dtype), ops.rotary_table(positions[:, -1:], rotation.frequency), form
    )
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])) if padded else None
    options = {"sink": sink, "scale": 0.25}
    got = ops.attend_unrotated(
        *(tilde, t, v), rotation=rotation, form=form, attend=None,
        visibility=Visibility(key_mask=mask), **options,
    )  # fmt: skip
    table = tuple(part[..., -9:, :].double() for part in rotation.table())
    k = ops.coca_keys(t.double(), table, form)
    want = oracles.attend(tilde.double(), k, v.double(), key_mask=mask, **options)
    assert (got.double() - want).norm() <= bound * want.norm()


SCALE = 8**-0.5


def _log_gates(length: int, shared: int, keys: int = 2) -> Tensor:
    return torch.nn.functional.logsigmoid(torch.randn(2, keys, length, shared).double())


def _by_head(log_gates_BPSR: Tensor) -> Tensor:
    return log_gates_BPSR.transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_columns_carry_the_sum_of_the_gates_between_in_every_dtype(shared, dtype):
    """The product of the rounded columns; sums of 100 thousand, beyond what float16 holds."""
    log_gates = _log_gates(301, shared)
    log_gates[:, :, 150] = -1e5
    q, k = ops.forget_columns(log_gates, 77, SCALE, dtype)
    assert q.shape[-1] % 8 == k.shape[-1] % 8 == 0
    got = q.double() @ k.double().repeat_interleave(shared, 1).mT * SCALE
    want = oracles.forget_bias(_by_head(log_gates), 77)
    past = torch.ones(77, 301).tril(301 - 77).bool()
    rounding = 2.0**-46 if dtype == torch.float64 else 2.0**-23
    assert ((got - want)[..., past].abs() <= 1e5 * rounding).all()
    assert (got.diagonal(301 - 77, -2, -1) == 0).all()  # a token forgets nothing of itself


@pytest.mark.parametrize("shared", [1, 3])
def test_gates_have_the_sum_s_gradient(shared):
    log_gates = _log_gates(19, shared).requires_grad_()
    q, k = ops.forget_columns(log_gates, 7, SCALE, torch.float64)
    got = q @ k.repeat_interleave(shared, 1).mT * SCALE
    past = torch.ones(7, 19).tril(12)
    agree(got, oracles.forget_bias(_by_head(log_gates), 7), [log_gates], bound=1e-9, shown=past)
