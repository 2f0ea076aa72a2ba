"""The spectrum of the matrix that multiplies the values, and of equal weights: rank collapse.

A product of many matrices whose singular values fall fast keeps one direction; the identity, whose
singular values are all 1, keeps all. It is taken of the first tokens of the first text.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from clearhead.diagnose.extrapolation import shown_layers
from clearhead.probe.attention_call import AttentionCall, Tile, normalised
from clearhead.probe.maps import maps_of

TOKENS = 128  # a singular value decomposition a head is cubic in them


class Spectrum:
    """By layer, of the first text observed.

    - `matrix_rank`: the effective rank of a head's matrix, exp of the entropy of its singular
      values normed to sum 1, mean over heads, divided by the number of tokens: 1 for the identity.
    - the curve `spectrum`: singular values in falling order, mean over heads, of four layers; and
      of `C`: in a shaped block the centring term of the first layer, mean over heads; else
      attention at equal scores, the mean over the visible keys.
    """

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}  # [tokens], mean over heads
        self.ranks: dict[int, float] = {}
        self.centre: Tensor | None = None

    def observe(self, call: AttentionCall) -> None:
        """Add a layer of the first text; later texts are ignored."""
        if call.layer in self.values:
            return
        matrix_HTT, centre_HTT = _matrix(call)
        if not bool(matrix_HTT.isfinite().all()):
            return
        singular = torch.linalg.svdvals(matrix_HTT.double())
        entropy = torch.special.entr(singular / singular.sum(-1, keepdim=True)).sum(-1)
        self.values[call.layer] = singular.mean(0).cpu()
        self.ranks[call.layer] = float(entropy.exp().mean()) / singular.shape[-1]
        if self.centre is None:
            self.centre = torch.linalg.svdvals(centre_HTT.double()).mean(0).cpu()

    def measures(self) -> list[dict[str, Any]]:
        return [
            {"metric": "matrix_rank", "layer": layer, "value": value}
            for layer, value in sorted(self.ranks.items())
        ]

    def curves(self) -> list[dict[str, Any]]:
        """Payloads of "curve" records."""
        if self.centre is None:
            return []
        shown = [n for n in shown_layers(max(self.values) + 1) if n in self.values]
        spectra = [({"map": "matrix", "layer": n}, self.values[n]) for n in shown]
        spectra.append(({"map": "C"}, self.centre))
        return [
            {"curve": "spectrum", **place, "x": list(range(1, len(y) + 1)), "y": y.tolist()}
            for place, y in spectra
        ]


def _matrix(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The matrix that multiplies the values of one text, and C, [heads or 1, T, T] both."""
    length = min(TOKENS, call.q.shape[2], call.k.shape[2])
    scores, visible = [], []
    for tile in call.scores():
        rows = slice(0, max(0, length - tile.start))
        seen = tile.visible[:1, :, rows, :length].expand(1, call.q.shape[1], -1, -1)
        part = tile.scores[:1, :, rows, :length].masked_fill(~seen, -torch.inf)
        width = (0, length - part.shape[-1])
        scores.append(pad(part, width, value=-torch.inf))
        visible.append(pad(seen, width))
        if tile.start + tile.scores.shape[2] >= length:
            break
    logit = call.null_logit(0, length)
    logit = logit[:1] if isinstance(logit, Tensor) and logit.ndim == 4 else logit
    weights, null = normalised(torch.cat(scores, 2), logit)
    shown = torch.cat(visible, 2)[:, :1]
    maps, whole = maps_of(call), Tile(0, weights, shown, null)
    matrix, centre = maps.shaped(whole, 0), maps.centre(whole)
    if matrix is None:
        matrix = maps.difference(weights, 0)
    if matrix is None:
        (matrix,) = maps.split(weights)
    if centre is None:
        centre = shown.double() / shown.sum(-1, keepdim=True).clamp_min(1)
    return matrix[0], centre[0]
