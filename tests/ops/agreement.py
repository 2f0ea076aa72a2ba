"""Two ways to one result: the same outputs, and the same gradients of every input."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from clearhead import ops
from clearhead.ops import oracles

# Bounds on the error relative to the largest entry: the rounding of the inputs' dtype, a few times.
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SINKS = {"softmax": None, "softmax1": 0.0, "sink": "a head", "by query": "a query"}


def errors(found: Iterable[Tensor], expected: Iterable[Tensor], least: float = 1.0) -> list[float]:
    """The largest differences, each relative to the largest number or `least`."""
    pairs = list(zip(found, expected, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return [
        float((a.double() - b.double()).abs().max() / b.abs().max().clamp_min(least))
        for a, b in pairs
    ]


def agree(
    got: Tensor,
    want: Tensor,
    inputs: Sequence[Tensor],
    exact: Sequence[Tensor] | None = None,
    *,
    bound: float,
    shown: Tensor | None = None,
    least: float = 1e-3,
) -> None:
    """Compare `got`, of `inputs`, with `want`, of `exact`: those in float64, or the same ones.

    `shown` is 0 where no output counts.
    """
    kept = torch.ones((), dtype=torch.bool) if shown is None else shown.bool()
    grad = (torch.randn(want.shape) * kept).to(got.dtype)
    found = [got * kept, *torch.autograd.grad(got, inputs, grad)]
    wanted = torch.autograd.grad(want, inputs if exact is None else exact, grad.to(want.dtype))
    off = errors(found, [want * kept, *wanted], least)
    assert max(off) < bound, f"by tensor: {off}"


def compare(
    *,
    heads: int = 4,
    groups: int = 2,
    queries: int = 9,
    keys: int | None = None,
    width: int = 8,
    value: int | None = None,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
    sink: float | str | None = None,
    prefix: int = 0,
    numbers: Sequence[Tensor] | None = None,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
    padding_counts: bool = False,
    times: float = 1.0,
    least: float = 1e-3,
    **options: object,
) -> None:
    """`ops.attend` of two texts of random numbers, and all its gradients, against the oracle.

    A sink is one of `SINKS`; logits "a head" or "a query" are learned. `prefix` keys stand before
    the text. `padding_counts` is False where outputs of hidden tokens are unspecified.
    """
    keys = keys or queries
    shapes = [(heads, queries, width), (groups, keys, width), (groups, keys, value or width)]
    if prefix:
        shapes += [(groups, prefix, width), (groups, prefix, value or width)]
    if numbers is None:
        numbers = [torch.randn(2, *shape).to(dtype) for shape in shapes]
        numbers = [layout(numbers[0] * spread), *map(layout, numbers[1:])]
    if isinstance(sink, str):
        shape = (heads,) if sink == "a head" else (2, heads, queries)
        exact_dtype = torch.promote_types(dtype, torch.float32)
        numbers = [*numbers, torch.randn(shape).to(exact_dtype)]
    inputs = [x.detach().requires_grad_() for x in numbers]
    exact = [x.detach().double().contiguous().requires_grad_() for x in inputs]

    def attend(run: Callable[..., Tensor], of: Sequence[Tensor], **more: object) -> Tensor:
        given = of[-1] if isinstance(sink, str) else sink
        return run(*of[:3], sink=given, prefix=(of[3], of[4]) if prefix else None, **more)

    got = attend(ops.attend, inputs, **options)
    assert got.dtype == inputs[0].dtype
    options.pop("kernel", None)
    want = attend(oracles.attend, exact, **options)
    mask, shown = options.get("key_mask"), None
    if isinstance(mask, Tensor) and not padding_counts:
        shown = mask[:, None, -got.shape[2] :, None]
    agree(got, want, inputs, exact, bound=times * BOUND[got.dtype], shown=shown, least=least)
