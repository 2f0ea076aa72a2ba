"""Kurtosis of hidden states in OrthoAdam's basis: outliers may be turned out of sight, not gone.

A rotated state has the same norm; what a few channels carry in one basis, all share in most
others. Low kurtosis after training in a rotated basis shows nothing by itself if it is high in that
basis (a reviewer's question about arXiv 2410.17174).
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.hidden import HiddenStatistics
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.probe.observation import INPUT


class RotatedKurtosis:
    """`kurtosis_rotated`, the `kurtosis` of Q x, where Q is OrthoAdam's rotation of the embedding's
    columns; its lines also say "rotation" and "rotation_share".

    Args:
        model: a language model of transformers.
        kind: "hadamard" or "haar".
        seed: as OrthoAdam's.
        share: as OrthoAdam's: by "size" all matrices that read the stream have this Q too.
    """

    def __init__(self, model: Any, *, kind: str, seed: int, share: str = "parameter") -> None:
        self._statistics = HiddenStatistics()
        self._about = {"rotation": kind, "rotation_share": share}
        # On the CPU it is made in float64; hidden states are float32 at most.
        table = model.get_input_embeddings().weight
        size = table.shape[-1]
        self._rotation = make_rotation(kind, seed=seed, size=size).to(model.device)
        self._signs = torch.ones(size, device=model.device)
        if share == "parameter":
            name = next(name for name, p in model.named_parameters() if p is table)
            self._signs = random_signs([sign_key(seed, name, -1)], size, model.device)[0]

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the output of a layer."""
        if layer != INPUT:
            self._statistics.observe(layer, self._rotation.apply(x_BTC.float() * self._signs, -1))

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records."""
        return [
            {**line, "metric": "kurtosis_rotated", **self._about}
            for line in self._statistics.measures()
            if line["metric"] == "kurtosis"
        ]
