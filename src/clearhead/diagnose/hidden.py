"""Outliers of the hidden states: kurtosis and largest activation at the output of every layer.

Definitions of arXiv 2410.17174 (its Table 2), per token over the channels, then the mean over
tokens; the first token and the rest apart, since the first carries most of the outliers.
"""

import math
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.quotients import over_layers
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.probe.observation import INPUT

TOKENS = ("first", "rest")


def kurtosis(x: Tensor) -> Tensor:
    """E[(x − µ)⁴] / E[(x − µ)²]² over the last dimension: raw, so that a Gaussian has 3.

    In float32 at least. NaN where it is undefined: in a constant row, or one that is not finite.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = x - x.mean(-1, keepdim=True)
    # It does not depend on the scale; so no fourth power overflows or vanishes.
    square = (centred / centred.abs().amax(-1, keepdim=True)).square()
    value = square.square().mean(-1) / square.mean(-1).square()
    # The mean of equal numbers may be off by a rounding, and the quotient any number.
    return value.masked_fill(x.amax(-1) == x.amin(-1), torch.nan)


class HiddenStatistics:
    """Kurtosis and largest activations by layer; position 0 is "first", the others "rest".

    - `kurtosis`: the mean over tokens of `kurtosis` over channels, without those undefined; a line
      says under "undefined" how many tokens had none (constant, infinite or NaN).
    - `largest_activation`: the mean over tokens of the largest |x| over channels.
    - `maximum_activation`: the largest |x| of any token.
    - `kurtosis_excess`: the mean kurtosis of first and rest together, less 3.

    Over layers it is the mean, of `maximum_activation` the maximum. A metric of no tokens is NaN.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], dict[str, Tensor]] = {}

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        if layer == INPUT:
            return
        largest_BT, kurtosis_BT = x_BTC.abs().amax(-1).double(), kurtosis(x_BTC).double()
        for tokens, part in (("first", slice(0, 1)), ("rest", slice(1, None))):
            largest, shape = largest_BT[:, part], kurtosis_BT[:, part]
            new = {
                "kurtosis": shape.nansum(),
                "defined": (~shape.isnan()).sum(),
                "tokens": torch.tensor(shape.numel()),
                "largest": largest.sum(),
                "maximum": torch.cat([largest.new_zeros(1), largest.flatten()]).amax(),
            }
            old = self._sums.setdefault((layer, tokens), {})
            for name, value in new.items():
                add = torch.maximum if name == "maximum" else torch.add
                old[name] = add(old[name], value) if name in old else value

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: over all layers, and by layer."""
        out: list[dict[str, Any]] = []
        for tokens in TOKENS:
            layers = {layer: sums for (layer, t), sums in sorted(self._sums.items()) if t == tokens}
            shapes = {n: float(s["kurtosis"] / s["defined"]) for n, s in layers.items()}
            undefined = {n: int(s["tokens"] - s["defined"]) for n, s in layers.items()}
            for line in over_layers(shapes, metric="kurtosis", tokens=tokens):
                count = undefined[line["layer"]] if "layer" in line else sum(undefined.values())
                out.append({**line, "undefined": count} if count else line)
            means = {n: float(s["largest"] / s["tokens"]) for n, s in layers.items()}
            out += over_layers(means, torch.mean, metric="largest_activation", tokens=tokens)
            tops = {n: float(s["maximum"]) if s["tokens"] else math.nan for n, s in layers.items()}
            out += over_layers(tops, torch.amax, metric="maximum_activation", tokens=tokens)
        pairs = {n: [self._sums[n, tokens] for tokens in TOKENS] for n, _ in self._sums}
        excess = {
            n: float(sum(s["kurtosis"] for s in pair) / sum(s["defined"] for s in pair)) - 3
            for n, pair in sorted(pairs.items())
        }
        return out + over_layers(excess, metric="kurtosis_excess")


class RotatedKurtosis:
    """`kurtosis_rotated`, the `kurtosis` of Q x, where Q is OrthoAdam's rotation of the embedding's
    columns; its lines also say "rotation" and "rotation_share".

    A rotated state has the same norm; what a few channels carry in one basis, all share in most
    others. Low kurtosis after training in a rotated basis shows nothing by itself if it is high in
    that basis (a reviewer's question about arXiv 2410.17174).

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
        if layer != INPUT:
            self._statistics.observe(layer, self._rotation.apply(x_BTC.float() * self._signs, -1))

    def measures(self) -> list[dict[str, Any]]:
        return [
            {**line, "metric": "kurtosis_rotated", **self._about}
            for line in self._statistics.measures()
            if line["metric"] == "kurtosis"
        ]
