"""Attention over CoCA's keys as cached: t, half as wide, unrotated."""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.coca import Form, coca_keys
from clearhead.ops.dispatch import KERNELS, select_kernel
from clearhead.ops.precision import without_autocast
from clearhead.ops.requests import UNROTATED
from clearhead.ops.rope import Rotation
from clearhead.ops.visibility import Visibility


def attend_unrotated(
    q_BHTD: Tensor,
    t_BGSE: Tensor,
    v_BGSV: Tensor,
    *,
    rotation: Rotation,
    form: Form,
    attend: Any,
    visibility: Visibility,
    sink: float | Tensor | None,
    scale: float,
    **options: Any,
) -> Tensor:
    """`attend` over `coca_keys(t, rotation.table(), form)`; a kernel may rotate t as it reads.

    Args:
        q_BHTD: as in `coca_queries`. t_BGSE: x W_T before the relu, [B, G, S, D/2].
        rotation: of the last S keys, or of more.
        attend: attention function, called with `options`, where no kernel reads t.

    Returns:
        [B, H, T, V].
    """
    keys = t_BGSE.shape[2]
    if q_BHTD.is_cuda and (first := visibility.earliest(q_BHTD.shape[2], keys)):
        t_BGSE, v_BGSV = t_BGSE[:, :, first:], v_BGSV[:, :, first:]
        visibility, keys = visibility.of_keys(first), keys - first
    settled = visibility.settled(q_BHTD.shape[2], keys)
    name = select_kernel(q_BHTD, t_BGSE, v_BGSV, settled, None, UNROTATED)
    if not name or options.get("prefix") is not None:
        table = tuple(part[..., -keys:, :] for part in rotation.table())
        k_BGSD = coca_keys(t_BGSE, table, form)  # type: ignore[arg-type]
        options |= {"visibility": visibility, "sink": sink, "scale": scale}
        return attend(q_BHTD, k_BGSD, v_BGSV, **options)
    if form == "slack":  # q · R [t; t] as q′ · R [t; 0]
        first_half, second_half = q_BHTD.chunk(2, -1)
        q_BHTD = torch.cat([first_half + second_half, second_half - first_half], -1)
    options = {"sink": sink, "scale": scale, "visibility": settled, "rotation": rotation}
    with without_autocast(q_BHTD):
        o: Tensor = KERNELS[name].run.unrotated(q_BHTD, t_BGSE, v_BGSV, **options)
        return o
