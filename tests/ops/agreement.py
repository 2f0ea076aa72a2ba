"""Two ways to one result: the same outputs, and the same gradients of every input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead import ops
from clearhead.ops import oracles

# Bounds on the error relative to the largest entry: the rounding of the inputs' dtype, a few times.
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SINKS = {"softmax": None, "softmax1": 0.0, "sink": "a head", "by query": "a query"}


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

    Args:
        bound: of the largest difference, relative to the largest number or `least`.
        shown: 1 where the output counts, and 0 elsewhere.
    """
    kept = torch.ones((), dtype=torch.bool) if shown is None else shown.bool()
    grad = (torch.randn(want.shape) * kept).to(got.dtype)
    found = [got * kept, *torch.autograd.grad(got, inputs, grad)]
    wanted = torch.autograd.grad(want, inputs if exact is None else exact, grad.to(want.dtype))
    for index, (a, b) in enumerate(zip(found, [want * kept, *wanted], strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b.double()).abs().max() / b.abs().max().clamp_min(least)
        assert error < bound, f"tensor {index}: {error:.2e}"


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
    layout: Callable[[Tensor], Tensor] = lambda x: x,
    padding_counts: bool = False,
    times: float = 1.0,
    least: float = 1e-3,
    **options: object,
) -> None:
    """`ops.attend` of two texts of random numbers, and all its gradients, against the oracle.

    Args:
        spread: the size of the queries.
        sink: of `SINKS`; logits "a head" or "a query" are learned.
        prefix: the number of keys and values before the text.
        layout: puts an input into memory.
        padding_counts: False where outputs of hidden tokens are unspecified.
        times: the bound, in `BOUND`s.
        options: masks, a window, a scale, a kernel.
    """
    keys = keys or queries
    shapes = [(heads, queries, width), (groups, keys, width), (groups, keys, value or width)]
    if prefix:
        shapes += [(groups, prefix, width), (groups, prefix, value or width)]
    numbers = [torch.randn(2, *shape).to(dtype) for shape in shapes]
    numbers[0] = numbers[0] * spread
    if isinstance(sink, str):
        shape = (heads,) if sink == "a head" else (2, heads, queries)
        numbers.append(torch.randn(shape).to(torch.promote_types(dtype, torch.float32)))
    numbers = [layout(x) if x.ndim == 4 else x for x in numbers]
    compare_of(numbers, sink, bool(prefix), padding_counts, times, least, options)


def compare_of(
    numbers: Sequence[Tensor],
    sink: float | str | None = None,
    prefixed: bool = False,
    padding_counts: bool = False,
    times: float = 1.0,
    least: float = 1e-3,
    options: dict[str, object] | None = None,
) -> None:
    """`compare` of these numbers: q, k, v, a prefix's keys and values, a learned sink."""
    options = options or {}
    inputs = [x.detach().requires_grad_() for x in numbers]
    exact = [x.detach().double().contiguous().requires_grad_() for x in inputs]

    def attend(run: Callable[..., Tensor], of: Sequence[Tensor], **more: object) -> Tensor:
        prefix = (of[3], of[4]) if prefixed else None
        given = of[-1] if isinstance(sink, str) else sink
        return run(*of[:3], sink=given, prefix=prefix, **more)

    got = attend(ops.attend, inputs, **options)
    assert got.dtype == inputs[0].dtype
    formula = {name: value for name, value in options.items() if name != "kernel"}
    want = attend(oracles.attend, exact, **formula)
    mask = options.get("key_mask")
    shown = None
    if isinstance(mask, Tensor) and not padding_counts:
        shown = mask[:, None, -got.shape[2] :, None]
    agree(got, want, inputs, exact, bound=times * BOUND[got.dtype], shown=shown, least=least)
