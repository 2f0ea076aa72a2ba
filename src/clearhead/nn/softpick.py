"""Softpick (arXiv 2504.20966): rectified softmax, with weights of exactly zero."""

import torch
from torch import Tensor

from clearhead.nn.bases import Softmax
from clearhead.ops import oracles
from clearhead.ops.attention import check
from clearhead.ops.precision import widened, without_autocast
from clearhead.ops.requests import repeat
from clearhead.ops.tiles import ROWS
from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec


def _as_softmax(score_BHRS: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """log(e^s − 1) where s > 0, else −1e30; and as the sink log Σ (1 − e^s) where s < 0."""
    picked = visible & (score_BHRS > 0)
    logit = score_BHRS + torch.log(-torch.expm1(-score_BHRS.clamp_min(1e-30)))
    below = -torch.expm1(torch.where(visible, score_BHRS.clamp_max(0), 0)).sum(-1, True)
    tiny = torch.finfo(score_BHRS.dtype).tiny
    return torch.where(picked, logit, -1e30), below.clamp_min(tiny).log()


class Softpick(Softmax):
    """relu(e^s − 1) / Σ |e^s − 1| over the visible keys; a row of zeros where no score is above 0.

    There is no fused kernel: `attend` is plain PyTorch on any device.
    """

    @staticmethod
    def attend(  # type: ignore[override]
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSV: Tensor,
        /,
        *,
        visibility: Visibility,
        scale: float,
        sink: float | Tensor | None = None,
        prefix: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[B, H, T, V] in the dtype of v, by tiles of queries against the keys that they may see.

        With m = max(0, s), |e^s − 1| e^−m is e^(relu(s) − m) (1 − e^−|s|), which neither overflows
        nor cancels. Training keeps the tiles for the backward pass: its memory grows with T · S.
        """
        check(q_BHTD, k_BGSD, v_BGSV, None, visibility)
        heads, queries, keys = *q_BHTD.shape[1:3], k_BGSD.shape[2]
        k, v = repeat(widened(k_BGSD), heads), repeat(v_BGSV, heads)
        outputs = []
        with without_autocast(q_BHTD):
            for span in visibility.spans(queries, keys, ROWS):
                start, stop, first, end = span
                q = widened(q_BHTD[:, :, start:stop])
                score = torch.matmul(q, k[:, :, first:end].mT) * scale
                hidden = visibility.hidden(span, queries, keys, q.device)
                if hidden is not None:
                    score = score.masked_fill(hidden, 0)  # |e^0 − 1| = 0
                above = score.relu()
                top = above.detach().amax(-1, keepdim=True)
                size = torch.exp(above - top) * -torch.expm1(-score.abs())
                total = size.sum(-1, keepdim=True)
                weight = size * (score > 0) / torch.where(total == 0, 1.0, total)
                outputs.append(torch.matmul(weight.to(v.dtype), v[:, :, first:end]))
        return torch.cat(outputs, 2)

    weights = staticmethod(oracles.softpick_weights)
    as_softmax = staticmethod(_as_softmax)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.shaping != "none" or layer.query_range == 0:
        return "from W_Q = 0 no gradient moves them: choose shaping='none', a query_range above 0"
    return None


DECLARATIONS = (
    Declaration(
        "normalizer",
        "softpick",
        "relu(e^s − 1) / Σ |e^s − 1|: weights may be 0, and a row may sum to less than 1",
        "arXiv 2504.20966",
        Softpick,
        refuses=_refuses,
    ),
)
