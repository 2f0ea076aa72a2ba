"""Every operation in every memory layout, and autograd functions compiled, against the oracles."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from clearhead import ops
from clearhead.ops.visibility import Visibility
from tests.ops import oracles

THETA = 10_000.0
LENGTH = 9


def _in_cut_rows(x: Tensor) -> Tensor:
    """A part of wider rows, whose other numbers must not be read."""
    wide = _unread(x.new_empty(*x.shape[:-1], x.shape[-1] + 3))
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x, _unread(x)], -1)[..., 0]


def _unread(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels first": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "heads beside tokens": lambda x: x.movedim(1, -2).contiguous().movedim(-2, 1),
    "cut rows": _in_cut_rows,
    "every second": _every_second,
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
    """An operation, its oracle, the shapes of what both take, and the bound of their difference.

    Masks, documents, positions and targets come after the numbers that have gradients.
    """

    fast: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    whole: Sequence[Tensor] = ()
    bound: float = 1e-10  # 1e-4 where a rotary table is float32


POSITIONS = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) * 3 + 2])
SEGMENTS = torch.arange(LENGTH).expand(2, -1).contiguous() // 4
MASK = torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[0], [3]])
Q, K, WIDE = (2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 12)


def _attending(**options: object) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def fast(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        return ops.attend(q, k, v, sink=sink[0] if sink else None, **options)

    def oracle(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        return oracles.attend(q, k, v, sink=sink[0] if sink else None, **options)

    return fast, oracle


def _masked(name: str, **options: object) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def by(module: Any) -> Callable[..., Tensor]:
        return lambda q, k, v, sink, mask: module.attend(
            q, k, v, sink=sink, **{name: mask}, **options
        )

    return by(ops), by(oracles)


def _table(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rope = {"rope_type": "default", "rope_theta": THETA}
    return ops.rotary_table(positions, ops.frequencies(rope, width, positions.device)[0])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def _coca(form: str, groups: int = 2) -> Case:
    def fast(q: Tensor, t: Tensor, positions: Tensor) -> Tensor:
        table = _table(positions, 8)
        return _scores(ops.coca_queries(q, table, form), ops.coca_keys(t, table, form))

    def oracle(q: Tensor, t: Tensor, positions: Tensor) -> Tensor:
        return oracles.coca_scores(q, t, positions, positions, THETA, form)

    width = 4 if form == "strict" else 8
    return Case(fast, oracle, [(2, 4, LENGTH, width), (2, groups, LENGTH, 4)], [POSITIONS], 1e-4)


def _xpos(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    frequency, _ = ops.frequencies({"rope_type": "default", "rope_theta": THETA}, 8, q.device)
    of_queries, of_keys = ops.xpos_tables(positions, positions, frequency, LENGTH // 2)
    return _where_earlier(_scores(ops.rotate(q, of_queries), ops.rotate(k, of_keys)), positions)


def _xpos_oracle(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    scores = oracles.xpos_scores(q, k, positions, positions, THETA)
    return _where_earlier(scores, positions)


def _where_earlier(scores: Tensor, positions: Tensor) -> Tensor:
    """Scores that the paper defines: of later keys the oracle and the rotary tables differ."""
    return torch.where(positions[:, None, :, None] >= positions[:, None, None], scores, 0)


def _alibi(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    of_queries, of_keys = ops.alibi_columns(positions, positions, ops.alibi_slopes(4), 1.0)
    return _scores(ops.with_columns(q, of_queries), ops.with_columns(k, of_keys))


def _alibi_oracle(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    return _scores(q, k) + oracles.alibi_bias(positions, positions, 4)


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

    return Case(by(ops), by(oracles), shapes, [MASK])


def _rms_norm(*gain: int) -> Case:
    def oracle(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        return x / x.pow(2).mean(-1, keepdim=True).add(1e-2).sqrt() * weight

    def fast(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return ops.rms_norm(x, weight, 1e-2)

    return Case(fast, oracle, [Q, gain])


def _mean(module: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        seen = {"key_mask": mask, "segments": segments}
        if module is oracles:
            return oracles.running_mean(x, 5, **seen)[0]
        return ops.running_mean(x, 5, Visibility(**seen))[0]

    return run


TARGET = torch.tensor([[3, -100, 0], [4, 2, 2], [1, -100, 3]])
CASES = {
    "attend": Case(*_attending(), [Q, K, K, (4,)]),
    "attend, values wider": Case(*_attending(), [Q, K, WIDE, (4,)]),
    "attend, values narrower": Case(*_attending(causal=False), [Q, K, (*K[:3], 3)]),
    "attend, padded": Case(*_masked("key_mask"), [Q, K, K, (4,)], [MASK]),
    "attend, packed": Case(*_masked("segments"), [Q, K, K, (4,)], [SEGMENTS]),
    "attend, last queries": Case(*_attending(), [(2, 4, 2, 8), K, K]),
    "attend, one query": Case(*_attending(), [(2, 4, 1, 8), K, K]),
    "attend, width 2": Case(
        *_attending(), [(2, 4, LENGTH, 2), (2, 4, LENGTH, 2), (2, 4, LENGTH, 2)]
    ),
    **{
        f"differential, {groups} keys, {sink}, {norm}": _differential(groups, sink, norm)
        for groups, sink, norm in (
            (2, None, "affine"),
            (4, "a head", "affine"),
            (8, "a head", "plain"),
            (2, 0.0, "plain"),
            (8, 0.0, "none"),
            (4, None, "none"),
        )
    },
    **{
        f"differential-v2, {groups} keys, {sink}": _differential(
            groups, sink, version="differential_v2"
        )
        for groups, sink in ((1, None), (2, "a head"), (4, 0.0))
    },
    "coca, exact": _coca("exact"),
    "coca, exact, a key for all": _coca("exact", 1),
    "coca, strict": _coca("strict", 4),
    "coca, slack": _coca("slack"),
    "xpos": Case(_xpos, _xpos_oracle, [Q, Q], [POSITIONS], 1e-4),
    "alibi": Case(_alibi, _alibi_oracle, [Q, K], [POSITIONS], 1e-3),
    "rotate": Case(
        lambda x, at: ops.rotate(x, _table(at, 8)),
        lambda x, at: oracles.rotate(x, at, THETA),
        [Q],
        [POSITIONS],
        1e-4,
    ),
    "running mean": Case(_mean(ops), _mean(oracles), [Q]),
    "running mean, padded": Case(_mean(ops), _mean(oracles), [Q], [MASK]),
    "running mean, packed": Case(_mean(ops), _mean(oracles), [Q], [MASK, SEGMENTS]),
    "rms norm": _rms_norm(8),
    "rms norm, one gain": _rms_norm(),
    "rms norm, no gain": _rms_norm()._replace(shapes=[Q]),
    "cross entropy": Case(
        lambda x, weight, target: ops.linear_cross_entropy(x, weight, target[:, 0]),
        lambda x, weight, target: oracles.linear_cross_entropy(x, weight, target[:, 0]),
        [(3, 6), (5, 6)],
        [TARGET],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_no_layout_of_inputs_or_gradients_changes_a_result(name, layout):
    case = CASES[name]
    numbers = [torch.randn(shape, dtype=torch.float64) for shape in case.shapes]
    inputs = [_laid_out(x, layout).detach().requires_grad_() for x in numbers]
    whole = [_laid_out(x, layout) for x in case.whole]
    exact = [
        x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in inputs
    ]
    got = case.fast(*inputs, *whole)
    want = case.oracle(*exact, *(x.contiguous() for x in whole))
    assert got.shape == want.shape
    _agree([got], [want], case.bound)
    for of_gradient in LAYOUTS:
        grad = _laid_out(torch.randn_like(want), of_gradient)
        _agree(
            torch.autograd.grad(got, inputs, grad, retain_graph=True),
            torch.autograd.grad(want, exact, grad.contiguous(), retain_graph=True),
            case.bound,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_lower_precision_takes_every_layout(layout, dtype):
    q, k, v = (_laid_out(torch.randn(s).to(dtype), layout).requires_grad_() for s in (Q, K, K))
    exact = [x.detach().double().contiguous().requires_grad_() for x in (q, k, v)]
    got, want = ops.attend(q, k, v, sink=0.0), oracles.attend(*exact, sink=0.0)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    _agree([got], [want], bound)
    # A sum's gradient is one number for all.
    _agree(torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(want.sum(), exact), bound)


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = (a.double() - b).abs().max() / b.abs().max().clamp_min(1)
        assert error < bound, f"tensor {index}: {error:.2e}"


B, H, G, T, S, D, V = 2, 4, 2, 5, 7, 6, 10
COMPILED = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 3},
    "padded": {"key_mask": torch.arange(S) >= torch.tensor([[0], [2]])},
    "packed": {"segments": torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2]])},
}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("sink", "prefixed", "mask"),
    [
        (None, False, "causal"),
        (None, True, "packed"),
        ("softmax1", True, "both ways"),
        ("softmax1", False, "padded"),
        ("by head", False, "window"),
        ("by head", True, "padded"),
        ("by query", True, "causal"),
        ("by query", False, "packed"),
    ],
)
def test_attention(sink, prefixed, mask):
    torch._dynamo.reset()
    inputs = {"q": _random(B, H, T, D), "k": _random(B, G, S, D), "v": _random(B, G, S, V)}
    if sink in ("by head", "by query"):
        inputs["sink"] = _random(H) if sink == "by head" else _random(B, H, T)
    if prefixed:
        inputs |= {"prefix_k": _random(B, G, 3, D), "prefix_v": _random(B, G, 3, V)}

    def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> Tensor:
        given = 0.0 if sink == "softmax1" else rest.get("sink")
        prefix = (rest["prefix_k"], rest["prefix_v"]) if prefixed else None
        return ops.attend(q, k, v, sink=given, prefix=prefix, **COMPILED[mask])

    _agree_compiled(attend, inputs)


def test_attention_to_keys_that_are_the_values_or_the_queries():
    x = {"x": _random(B, H, S, D)}
    _agree_compiled(lambda x: ops.attend(x, x, x, sink=0.0), x)
    _agree_compiled(lambda x: ops.attend(2 * x, x, x), x)


def _agree_compiled(function, inputs: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        out = run(**inputs)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), list(inputs.values()))))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
