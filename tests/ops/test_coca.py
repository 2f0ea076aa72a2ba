"""CoCA's dot products against the N × N × D equations, and what sets its three forms apart."""

import pytest
import torch
from torch import Tensor

from clearhead.ops import (
    Rotation,
    attend_unrotated,
    coca_keys,
    coca_queries,
    frequencies,
    oracles,
    rotary_table,
)
from clearhead.ops.coca import folded_authors_weight
from clearhead.ops.visibility import Visibility

FORMS = ["exact", "strict", "slack"]
THETA = 10_000.0


def _table(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rope = {"rope_type": "default", "rope_theta": THETA}
    return rotary_table(positions, frequencies(rope, width, positions.device)[0])


def _inputs(
    form: str, *, heads: int = 4, groups: int = 2, length: int = 9, width: int = 8
) -> list[Tensor]:
    q = torch.randn(2, heads, length, width // 2 if form == "strict" else width)
    t = torch.randn(2, groups, length, width // 2)
    return [x.double().requires_grad_() for x in (q, t)]


def _scores(q: Tensor, t: Tensor, positions: Tensor, form: str) -> Tensor:
    table = _table(positions, 2 * t.shape[-1])
    keys = coca_keys(t, table, form)
    return coca_queries(q, table, form) @ keys.repeat_interleave(q.shape[1] // t.shape[1], 1).mT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scores_and_gradients_match_the_equations(form, groups):
    inputs = _inputs(form, groups=groups)
    positions = torch.stack([torch.arange(9), torch.arange(9) * 7 + 3])
    got = _scores(*inputs, positions, form)
    want = oracles.coca_scores(*inputs, positions, positions, THETA, form)
    grad = torch.randn_like(want)
    found = [got, *torch.autograd.grad(got, inputs, grad)]
    expected = [want, *torch.autograd.grad(want, inputs, grad)]
    for a, b in zip(found, expected, strict=True):
        # The rotary table is float32: angles of some tens keep six digits.
        assert (a - b).abs().max() / b.abs().max() < 1e-5


def test_exact_is_equation_17():
    """Σ_j t_j |q_j|² cos((m−n)θ_j), the closed form, against the N × N × D transcription."""
    q, t = (x.detach() for x in _inputs("exact", groups=4))
    at = torch.arange(9)
    got = oracles.coca_scores(q, t, at[None], at[None], THETA, "exact")
    angle = (at[:, None] - at)[..., None] * THETA ** (-torch.arange(4).double() / 4)
    amplitude = q[..., :4] ** 2 + q[..., 4:] ** 2
    want = torch.einsum("bhmj,bhnj,mnj->bhmn", amplitude, t.relu(), angle.cos())
    assert torch.allclose(got, want, atol=1e-12)


def test_slack_with_equal_halves_is_strict_and_otherwise_far_from_exact():
    q, t = (x.detach() for x in _inputs("strict"))
    at = torch.arange(9)[None]
    whole = torch.cat([q, q], -1)
    strict = _scores(q, t, at, "strict")
    for form in ("exact", "slack"):
        assert torch.allclose(_scores(whole, t, at, form), strict, atol=1e-6)
    other = torch.randn_like(whole)
    difference = _scores(other, t, at, "slack") - _scores(other, t, at, "exact")
    assert difference.abs().max() > 1


def test_a_tokens_own_score_is_the_largest_it_can_have():
    q, t = (x.detach() for x in _inputs("exact", groups=4, width=32))
    scores = _scores(q, t, torch.arange(9)[None], "exact")
    bound = (q[..., :16] ** 2 + q[..., 16:] ** 2) @ t.relu().mT
    assert (scores <= bound + 1e-4).all()
    assert (scores.diagonal(dim1=-2, dim2=-1) >= 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_rounds_once(form):
    """A = q² would overflow float16 at |q| = 181 before the score does; squares are float32."""
    q, t = (x.detach().float() for x in _inputs(form, groups=4))
    at = torch.arange(9)[None]
    table = _table(at, 8)
    exact = coca_queries(q, table, form)
    rounded = coca_queries(q.bfloat16(), table, form)
    assert rounded.dtype == torch.bfloat16
    once = coca_queries(q.bfloat16().float(), table, form).bfloat16()
    assert torch.equal(rounded, once)
    assert torch.equal(coca_keys(t.bfloat16(), table, form).float() * 0, exact * 0)


def test_the_authors_weights_fold_into_ours():
    """Their t = relu((t1 + t2) / 2) of the two halves of x W_T."""
    weight, x = torch.randn(3 * 8, 5), torch.randn(7, 5)
    theirs = (x @ weight.T).view(7, 3, 2, 4).mean(2)
    ours = (x @ folded_authors_weight(weight, 8).T).view(7, 3, 4)
    assert torch.allclose(theirs, ours, atol=1e-6)


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
    rotation = Rotation(positions, frequencies(rope, 16, positions.device)[0], 1.1)
    tilde = coca_queries(q.to(dtype), rotary_table(positions[:, -1:], rotation.frequency), form)
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])) if padded else None
    options = {"sink": sink, "scale": 0.25}
    got = attend_unrotated(
        *(tilde, t, v), rotation=rotation, form=form, attend=None,
        visibility=Visibility(key_mask=mask), **options,
    )  # fmt: skip
    table = tuple(part[..., -9:, :].double() for part in rotation.table())
    k = coca_keys(t.double(), table, form)
    want = oracles.attend(tilde.double(), k, v.double(), key_mask=mask, **options)
    assert (got.double() - want).norm() <= bound * want.norm()
