"""Kernels that attention starts on a GPU, counted without one: PyTorch's calls, one by one.

The adapters run as on CUDA, in half precision, over stand-ins of the kernels. A call that returns a
view or unwritten memory starts nothing; PyTorch's kernels of attention start what is written here.
"""

import pytest
import torch

from clearhead.ops import attend, differential
from tests.ops.launches import Launches
from tests.ops.stand_ins import cuda_kernels  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("cuda_kernels")


def _launches(
    length: int,
    *,
    dtype=torch.bfloat16,
    documents=False,
    padding=0.0,
    holes=False,
    sink=None,
    function=attend,
) -> tuple[int, int]:
    """Those of a forward and of a backward pass, once a model's first layer has read its masks."""
    drawn = (torch.randn(2, length, 4, 32).to(dtype).transpose(1, 2) for _ in range(3))
    inputs = [x.requires_grad_() for x in drawn]
    at, options = torch.arange(length).expand(2, -1), {}
    if documents:
        options["segments"] = at * 4 // length
    if padding:
        options["key_mask"] = at >= int(length * padding)
    if holes:
        options["key_mask"] = at % 3 > 0
    if sink == "learned":
        sink = torch.zeros(4, requires_grad=True)
        inputs.append(sink)
    if function is differential:
        options |= {"lam": torch.tensor(0.3, requires_grad=True), "gain": 1.0}
        options |= {"norm_weight": None, "norm_eps": None}
        inputs.append(options["lam"])
    run = lambda: function(*inputs[:3], sink=sink, **options)  # noqa: E731
    run()
    with Launches() as forward:
        out = run()
    grad = torch.randn_like(out)
    with Launches() as backward:
        torch.autograd.grad(out, inputs, grad)
    return forward.names.total(), backward.names.total()


SOFTMAX1, SINKS = {"sink": 0.0}, {"sink": "learned"}
FLOAT = {"dtype": torch.float32}
ROWS = {  # title: kernel, options, launches of a forward and of a backward pass
    "softmax-1": ("cudnn", SOFTMAX1, (6, 3)),
    "learned sinks": ("cudnn", SINKS, (5, 10)),
    "T < S, windows: softmax-1": ("flash", SOFTMAX1, (6, 3)),
    "documents: softmax-1": ("flash-packed", {"documents": True} | SOFTMAX1, (6, 3)),
    "padding of an eighth: softmax-1": ("flash-packed", {"padding": 1 / 8} | SOFTMAX1, (6, 3)),
    "padding of a half: softmax-1": ("flash-packed", {"padding": 1 / 2} | SOFTMAX1, (6, 3)),
    "padding between a text's tokens: softmax": ("flash-packed", {"holes": True}, (8, 15)),
    "float32: softmax-1": ("efficient", FLOAT | SOFTMAX1, (6, 6)),
    "float32, documents: softmax": ("efficient", FLOAT | {"documents": True}, (2, 7)),
    "V1 by a call for both maps": ("cudnn", {"function": differential}, (9, 16)),
}


@pytest.mark.parametrize("title", ROWS)
def test_attention_starts_as_many_kernels_at_any_length(title, monkeypatch):
    kernel, options, expected = ROWS[title]
    monkeypatch.setattr("clearhead.ops.attention.select_kernel", lambda *_, **__: kernel)
    counts = {_launches(length, **options) for length in (64, 320)}
    assert counts == {expected}


def test_tiles_start_more_the_longer_a_text_is(monkeypatch):
    """What the table keeps off a GPU, and a check of the counting."""
    monkeypatch.setattr("clearhead.ops.attention.select_kernel", lambda *_, **__: "tiles")
    (short, long) = (_launches(length) for length in (64, 1024))
    assert long[0] > 4 * short[0]
