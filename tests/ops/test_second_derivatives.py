"""Second derivatives against finite differences, on every path that has its own backward pass."""

import pytest
import torch
from torch import Tensor

from clearhead.ops import attend, linear_cross_entropy

LENGTH = 4
MASK = torch.tensor([[True] * LENGTH, [False] + [True] * (LENGTH - 1)])
SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("sink", [None, 0.0, "learned"], ids=["softmax", "softmax1", "sink"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"key_mask": MASK},
        {"segments": SEGMENTS, "key_mask": MASK},
    ],
    ids=["stock", "full", "padded", "tiles"],
)
def test_attention_differentiates_twice(sink, options):
    inputs = [_numbers(2, 2, LENGTH, 4), _numbers(2, 1, LENGTH, 4), _numbers(2, 1, LENGTH, 3)]
    if sink == "learned":
        inputs.append(_numbers(2))

    def run(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return attend(q, k, v, sink=learned[0] if learned else sink, **options)

    assert torch.autograd.gradgradcheck(run, inputs)


def test_inputs_made_from_one_another_are_counted_once():
    def run(q: Tensor) -> Tensor:
        k = 2 * q
        return attend(q, k, k * q)

    q = _numbers(1, 2, LENGTH, 4)
    assert torch.autograd.gradcheck(run, q)
    assert torch.autograd.gradgradcheck(run, q)
    plain = torch.autograd.grad(run(q).sum(), q)[0]
    again = torch.autograd.grad(run(q).sum(), q, create_graph=True)[0]
    assert torch.allclose(plain, again)


def test_later_queries_differentiate_twice():
    inputs = [_numbers(1, 2, 2, 4), _numbers(1, 2, LENGTH, 4), _numbers(1, 2, LENGTH, 4)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: attend(q, k, v, sink=0.0), inputs)


@pytest.mark.parametrize("targets", [[3, -100, 0], [-100, -100, -100]], ids=["some", "none"])
def test_the_loss_differentiates_twice(targets):
    target = torch.tensor(targets)
    inputs = _numbers(3, 4), _numbers(5, 4)
    assert torch.autograd.gradgradcheck(lambda x, w: linear_cross_entropy(x, w, target), inputs)


def test_a_gradient_s_own_graph_is_made_only_if_it_is_asked_for():
    """Or else training would hold all scores at once."""
    q = _numbers(1, 2, LENGTH, 4)
    (plain,) = torch.autograd.grad(attend(q, q, q).sum(), q)
    (again,) = torch.autograd.grad(attend(q, q, q).sum(), q, create_graph=True)
    assert not plain.requires_grad
    assert again.requires_grad


def test_compiled_operations_refuse_to_differentiate_twice():
    torch._dynamo.reset()
    q = _numbers(1, 2, LENGTH, 4)
    out = torch.compile(lambda q: attend(q, 2 * q, 3 * q), backend="aot_eager", fullgraph=True)(q)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    # torch 2.11 makes no graph of a compiled gradient, later versions refuse it by name.
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):
        gradient.sum().backward()
