"""Float64 stand-ins for PyTorch's CUDA kernels, registered for the CPU under the kernels' names.

They are written from the kernels' documented meaning, and refuse what the kernels refuse or would
read wrongly: so the adapters around them, and every argument by its schema, are tested without a
GPU. `test_gpu.py` runs the same requests by the kernels themselves.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def cuda_kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name in (
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_efficient_attention_forward",
        "_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ):
        library.impl(name, globals()[name])
    yield
    library._destroy()


def _attend(q, k, v, *, causal, scale, before=None, after=None):
    """One text: [T, H, D], [S, G, D], [S, G, V] → [T, H, V], log-sum-exp [H, T]; no key: ∞."""
    dtype, (q, k, v) = q.dtype, (x.double() for x in (q, k, v))
    score = _scores(q, k, causal, scale, before, after)
    lse = score.logsumexp(-1)
    weight = torch.exp(score - torch.where(lse == -torch.inf, torch.inf, lse)[..., None])
    value = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    lse = lse.where(lse != -torch.inf, torch.inf).to(torch.promote_types(dtype, torch.float32))
    return torch.einsum("hts,shv->thv", weight, value).to(dtype), lse


def _differentiate(grad, q, k, v, o, lse, *, causal, scale, before=None, after=None):
    dtype, (grad, q, k, v, o) = q.dtype, (x.double() for x in (grad, q, k, v, o))
    shared, groups = q.shape[1] // k.shape[1], k.shape[1]
    weight = torch.exp(_scores(q, k, causal, scale, before, after) - lse[..., None])
    value, key = (x.repeat_interleave(shared, 1) for x in (v, k))
    row = (grad * o).sum(-1).T[..., None]
    dscore = weight * (torch.einsum("thv,shv->hts", grad, value) - row) * scale
    dq = torch.einsum("hts,shd->thd", dscore, key)
    dk, dv = torch.einsum("hts,thd->shd", dscore, q), torch.einsum("hts,thv->shv", weight, grad)
    dk, dv = (x.unflatten(1, (groups, shared)).sum(2) for x in (dk, dv))
    return tuple(x.to(dtype) for x in (dq, dk, dv))


def _scores(q, k, causal, scale, before, after):
    score = torch.einsum("thd,shd->hts", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    score = score * scale
    own = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))[None]
    hidden = (key > own) if causal else torch.zeros(len(q), len(k), dtype=torch.bool)
    if before is not None and before >= 0:
        hidden = hidden | (key < own - before)
    if after is not None and after >= 0:
        hidden = hidden | (key > own + after)
    return score.masked_fill(hidden, -torch.inf)


def _check_rows(*tensors: Tensor) -> None:
    """What loads of 16 bytes in half precision take for granted."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert all(start % 8 == 0 for start in (x.storage_offset(), *x.stride()[:-1]))


def _check_ends(ends: Tensor, tokens: int, longest: int) -> None:
    assert ends.dtype == torch.int32
    assert ends.is_contiguous()
    assert ends[0] == 0
    assert ends[-1] == tokens
    assert ends.diff().max() <= longest


def _flash_attention_forward(
    q, k, v, ends_q, ends_k, max_q, max_k, dropout, causal, debug, *, scale=None,
    window_size_left=None, window_size_right=None, **others,
):  # fmt: skip
    _check_rows(q, k, v)
    assert k.shape == v.shape
    if ends_q is not None:
        _check_ends(ends_q, len(q), max_q)
        _check_ends(ends_k, len(k), max_k)
        assert min(max_q, max_k) > 1
    options = {"causal": causal, "scale": scale}
    options |= {"before": window_size_left, "after": window_size_right}
    outputs, lses = _each(_attend, ((q, ends_q), (k, ends_k), (v, ends_k)), options)
    o, lse = _joined(outputs, ends_q), _joined(lses, ends_q, 1)
    return o, lse, q.new_empty(2), q.new_empty(()), q.new_empty(0)


def _flash_attention_backward(
    grad, q, k, v, o, lse, ends_q, ends_k, max_q, max_k, dropout, causal, state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _check_rows(q, k, v, o)
    assert lse.is_contiguous()
    if ends_q is not None:
        _check_ends(ends_q, len(q), max_q)
    options = {"causal": causal, "scale": scale}
    options |= {"before": window_size_left, "after": window_size_right}
    texts = (grad, ends_q), (q, ends_q), (k, ends_k), (v, ends_k), (o, ends_q), (lse, ends_q, 1)
    return tuple(_joined(x, ends_q) for x in _each(_differentiate, texts, options))


def _efficient_attention_forward(
    q, k, v, bias, ends_q, ends_k, max_q, max_k, dropout, kind, compute_lse=False, *, scale=None,
    seqlen_k=None, window_size=None,
):  # fmt: skip
    _check_rows(q, k, v)
    assert bias is None
    assert q.shape[2] == k.shape[2] == v.shape[2]
    longest = q.shape[1]
    if ends_q is None:
        assert (max_q, max_k) == (None, None)
    else:
        assert len(q) == 1
        q, k, v, longest = q[0], k[0], v[0], max_q
        _check_ends(ends_q, len(q), max_q)
        _check_ends(ends_k, len(k), max_k)
    options = _efficient_options(kind, scale, window_size)
    outputs, lses = _each(_attend, ((q, ends_q), (k, ends_k), (v, ends_k)), options)
    lse = lses[0].new_full((len(lses), q.shape[-2], -(-longest // 32) * 32), torch.inf)
    for row, part in zip(lse, lses, strict=True):
        row[:, : part.shape[1]] = part
    o = _joined(outputs, ends_q)
    o = o if ends_q is None else o[None]
    return o, lse, q.new_empty(()), q.new_empty(()), longest, longest


def _efficient_attention_backward(
    grad, q, k, v, bias, o, ends_q, ends_k, max_q, max_k, lse, dropout, seed, offset, kind,
    bias_requires_grad, *, scale=None, num_splits_key=None, window_size=None,
    shared_storage_dqdkdv=False,
):  # fmt: skip
    _check_rows(grad, q, k, v, o)
    assert bias is None
    assert lse.shape[2] % 32 == 0
    if ends_q is None:
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        lses = [row[:, : q.shape[1]] for row in lse]
    else:
        grad, q, k, v, o = (x[0] for x in (grad, q, k, v, o))
        _check_ends(ends_q, len(q), max_q)
        lses = [row[:, :length] for row, length in zip(lse, ends_q.diff(), strict=True)]
    options = _efficient_options(kind, scale, window_size)
    texts = [(grad, ends_q), (q, ends_q), (k, ends_k), (v, ends_k), (o, ends_q)]
    gradients = _each(_differentiate, texts, options, lses)
    gradients = (_joined(x, ends_q) for x in gradients)
    return *(x if ends_q is None else x[None] for x in gradients), q.new_empty(())


def _scaled_dot_product_cudnn_attention(
    q, k, v, bias, compute_lse, dropout=0.0, causal=False, debug=False, *, scale=None
):
    _check_rows(q, k, v)
    assert q.shape[2] == k.shape[2]
    assert bias is None
    texts = [(x.transpose(1, 2), None) for x in (q, k, v)]
    o, lse = map(torch.stack, _each(_attend, texts, {"causal": causal, "scale": scale}))
    none = q.new_empty(0)
    return o.transpose(1, 2), lse[..., None], none, none, q.shape[2], k.shape[2], none, none, none


def _scaled_dot_product_cudnn_attention_backward(
    grad, q, k, v, o, lse, seed, offset, bias, ends_q, ends_k, max_q, max_k, dropout, causal, *,
    scale=None,
):  # fmt: skip
    _check_rows(grad, q, k, v, o)
    assert lse.shape == (*q.shape[:3], 1)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    texts = [(x.transpose(1, 2), None) for x in (grad, q, k, v, o)]
    options = {"causal": causal, "scale": scale}
    gradients = _each(_differentiate, [*texts, (lse[..., 0], None)], options)
    return tuple(torch.stack(x).transpose(1, 2) for x in gradients)


def _each(function, tensors, options, *lists):
    """A function's results, by result, of each row or, where ends are given, of each text."""
    cut = [
        x.unbind(0) if ends is None else x.split(ends.diff().tolist(), *dim)
        for x, ends, *dim in tensors
    ]
    texts = zip(*cut, *lists, strict=True)
    return list(zip(*(function(*text, **options) for text in texts), strict=True))


def _joined(parts, ends, dim=0):
    return torch.stack(parts) if ends is None else torch.cat(parts, dim)


def _efficient_options(kind: int, scale: float | None, window: int | None) -> dict[str, object]:
    assert kind in (0, 2)  # none, causal from the bottom right
    assert window is None or kind == 2
    before = None if window is None else window - 1
    return {"causal": kind == 2, "scale": scale, "before": before}
