"""Every operation in every memory layout, and attention compiled, against the oracles."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from clearhead import ops
from clearhead.ops.visibility import Visibility
from tests.ops import oracles
from tests.ops.agreement import errors

LENGTH = 9


def _in_cut_rows(x: Tensor) -> Tensor:
    """A part of wider rows, whose other numbers must not be read."""
    wide = _unread(x.new_empty(*x.shape[:-1], x.shape[-1] + 3))
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def _unread(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels first": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "heads beside tokens": lambda x: x.movedim(1, -2).contiguous().movedim(-2, 1),
    "cut rows": _in_cut_rows,
    "every second": lambda x: torch.stack([x, _unread(x)], -1)[..., 0],
    "flipped": lambda x: x.mT.contiguous().mT.flip(-1),
    "one row for all": lambda x: x[:1].expand(x.shape),
    "one column for all": lambda x: x[..., :1].expand(x.shape),
    "one number for all": lambda x: x.flatten()[0].expand(x.shape),
}


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if x.ndim < 2 and layout in ("transposed", "channels first", "heads beside tokens", "flipped"):
        return x
    return x if x.ndim == 0 else LAYOUTS[layout](x)


class Case(NamedTuple):
    """An operation, given `ops` or the oracles, and the shapes of its numbers with gradients.

    Masks, documents and targets come after these.
    """

    by: Callable[[Any], Callable[..., Tensor]]
    shapes: Sequence[tuple[int, ...]]
    whole: Sequence[Tensor] = ()


SEGMENTS = torch.arange(LENGTH).expand(2, -1).contiguous() // 4
MASK = torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[0], [3]])
Q, K, WIDE = (2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 12)


def _attending(
    mask: str | None = None, **options: object
) -> Callable[[Any], Callable[..., Tensor]]:
    def by(module: Any) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, *masks: Tensor) -> Tensor:
            given = {mask: masks[0]} if mask else {}
            return module.attend(q, k, v, sink=sink, **given, **options)

        return run

    return by


def _differential(
    groups: int, sink: float | str | None, norm: str = "", version: str = "differential"
) -> Case:
    """Of 8 queries; V1 with a norm of a head by a gain, "plain", or none."""
    shapes: list[tuple[int, ...]] = [(2, 8, LENGTH, 6), *[(2, groups, LENGTH, 6)] * 2]
    shapes += [()] if version == "differential" else [(2, 4, LENGTH, 1)]
    shapes += [(12,)] * (norm == "affine") + [(8,)] * (sink == "a head")

    def by(module: Any) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *rest: Tensor) -> Tensor:
            options: dict[str, Any] = {"sink": rest[-2] if sink == "a head" else sink}
            if version == "differential":
                weight = rest[0] if norm == "affine" else None
                eps = None if norm == "none" else 1e-2
                options |= {"norm_weight": weight, "norm_eps": eps, "gain": 0.6}
            return getattr(module, version)(q, k, v, lam, key_mask=rest[-1], **options)

        return run

    return Case(by, shapes, [MASK])


def _rms_norm(module: Any) -> Callable[..., Tensor]:
    def oracle(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        return x / x.pow(2).mean(-1, keepdim=True).add(1e-2).sqrt() * weight

    return oracle if module is oracles else lambda x, weight=None: ops.rms_norm(x, weight, 1e-2)


def _mean(module: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        seen = {"key_mask": mask, "segments": segments}
        if module is oracles:
            return oracles.running_mean(x, 5, **seen)[0]
        return ops.running_mean(x, 5, Visibility(**seen))[0]

    return run


def _loss(module: Any) -> Callable[..., Tensor]:
    return lambda x, weight, target: module.linear_cross_entropy(x, weight, target[:, 0])


TARGET = torch.tensor([[3, -100, 0], [4, 2, 2], [1, -100, 3]])
CASES = {
    "attend": Case(_attending(), [Q, K, K, (4,)]),
    "attend, values wider": Case(_attending(), [Q, K, WIDE, (4,)]),
    "attend, values narrower": Case(_attending(causal=False), [Q, K, (*K[:3], 3), (4,)]),
    "attend, padded": Case(_attending("key_mask"), [Q, K, K, (4,)], [MASK]),
    "attend, packed": Case(_attending("segments"), [Q, K, K, (4,)], [SEGMENTS]),
    "attend, last queries": Case(_attending(), [(2, 4, 2, 8), K, K, (4,)]),
    "attend, one query": Case(_attending(), [(2, 4, 1, 8), K, K, (4,)]),
    "attend, width 2": Case(_attending(), [*[(2, 4, LENGTH, 2)] * 3, (4,)]),
    **{
        f"differential, {groups} keys, {sink}, {norm}": _differential(groups, sink, norm)
        for groups, sink, norm in (
            *((2, None, "affine"), (4, "a head", "affine"), (8, "a head", "plain")),
            *((2, 0.0, "plain"), (8, 0.0, "none"), (4, None, "none")),
        )
    },
    **{
        f"v2, {groups} keys, {sink}": _differential(groups, sink, version="differential_v2")
        for groups, sink in ((1, None), (2, "a head"), (4, 0.0))
    },
    "running mean": Case(_mean, [Q]),
    "running mean, padded": Case(_mean, [Q], [MASK]),
    "running mean, packed": Case(_mean, [Q], [MASK, SEGMENTS]),
    "rms norm": Case(_rms_norm, [Q, (8,)]),
    "rms norm, one gain": Case(_rms_norm, [Q, ()]),
    "rms norm, no gain": Case(_rms_norm, [Q]),
    "cross entropy": Case(_loss, [(3, 6), (5, 6)], [TARGET]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_no_layout_of_inputs_or_gradients_changes_a_result(name, layout):
    by, shapes, masks = CASES[name]
    inputs = [_laid_out(torch.randn(shape).double(), layout).requires_grad_() for shape in shapes]
    exact = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    exact = [x.requires_grad_() for x in exact]
    got = by(ops)(*inputs, *(_laid_out(x, layout) for x in masks))
    want = by(oracles)(*exact, *(_laid_out(x, layout).contiguous() for x in masks))
    assert got.shape == want.shape
    assert max(errors([got], [want])) < 1e-10
    for of_gradient in LAYOUTS:
        grad = _laid_out(torch.randn_like(want), of_gradient)
        found = torch.autograd.grad(got, inputs, grad, retain_graph=True)
        expected = torch.autograd.grad(want, exact, grad.contiguous(), retain_graph=True)
        assert max(errors(found, expected)) < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_attention_in_lower_precision_takes_every_layout(layout, dtype, bound):
    inputs = [_laid_out(torch.randn(s).to(dtype), layout).requires_grad_() for s in (Q, K, K)]
    exact = [x.detach().double().contiguous().requires_grad_() for x in inputs]
    got, want = ops.attend(*inputs, sink=0.0), oracles.attend(*exact, sink=0.0)
    # A sum's gradient is one number for all.
    found = [got, *torch.autograd.grad(got.sum(), inputs)]
    assert max(errors(found, [want, *torch.autograd.grad(want.sum(), exact)])) < bound


H, T, S = 4, 5, 7
PADDED = {"key_mask": torch.arange(S) >= torch.tensor([[0], [2]])}
PACKED = {"segments": torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2]])}


def _random(*shape: int) -> Tensor:
    return torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("sink", "prefixed", "options"),
    [
        (None, False, {}),
        (None, True, PACKED),
        (None, True, {"causal": False, "sink": 0.0}),
        (None, False, PADDED | {"sink": 0.0}),
        ((H,), False, {"window": 3}),
        ((H,), True, PADDED),
        ((2, H, T), True, {}),
        ((2, H, T), False, PACKED),
    ],
)
def test_attention(sink, prefixed, options):
    inputs = {"q": _random(H, T, 6), "k": _random(2, S, 6), "v": _random(2, S, 10)}
    if sink is not None:
        inputs["sink"] = torch.randn(sink, dtype=torch.float64, requires_grad=True)
    if prefixed:
        inputs |= {"prefix_k": _random(2, 3, 6), "prefix_v": _random(2, 3, 10)}

    def attend(q: Tensor, k: Tensor, v: Tensor, prefix_k=None, prefix_v=None, **rest) -> Tensor:
        prefix = (prefix_k, prefix_v) if prefixed else None
        return ops.attend(q, k, v, prefix=prefix, **rest, **options)

    _agree_compiled(attend, inputs)


def test_attention_to_keys_that_are_the_values_or_the_queries():
    x = {"x": _random(H, S, 6)}
    _agree_compiled(lambda x: ops.attend(x, x, x, sink=0.0), x)
    _agree_compiled(lambda x: ops.attend(2 * x, x, x), x)


def _agree_compiled(function, inputs: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        out = run(**inputs)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), list(inputs.values()))))
    torch.testing.assert_close(*reversed(results))
