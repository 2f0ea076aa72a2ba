"""Hidden states: kurtosis, outliers, norm, similarity and rank, at the output of every layer.

Kurtosis is computed per token over the channels, then averaged over tokens, as in arXiv 2410.17174
(Table 2); separately for the first token, which has most of the outliers, and the rest.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.means import Means, Sizes
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.probe.observation import INPUT

PARTS = (("first", slice(0, 1)), ("rest", slice(1, None)))
RANKED = 4  # texts: effective rank takes an eigenvalue problem each
SAMPLED = 8  # of so many numbers one is in the median
OUTLIER = 30.0  # × the layer's median |x|; the largest of 10⁸ Gaussian numbers is at 8.5 ×
LISTED = 16  # channels


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


class HiddenStatistics(Means):
    """Means by layer over the "first" tokens and over the "rest" (NaN of none): the `kurtosis` of a
    token's channels, where defined, and `largest_activation`, its largest |x|. `kurtosis_excess` is
    the mean kurtosis of all tokens, less 3."""

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        if layer == INPUT:
            return
        largest_BT, kurtosis_BT = x_BTC.abs().amax(-1).double(), kurtosis(x_BTC).double()
        defined_BT = ~kurtosis_BT.isnan()
        for tokens, part in PARTS:
            shape, largest, defined = (x[:, part] for x in (kurtosis_BT, largest_BT, defined_BT))
            line = {"tokens": tokens}
            self.add(layer, shape.nansum(), defined.sum(), metric="kurtosis", **line)
            self.add(layer, largest.sum(), largest.numel(), metric="largest_activation", **line)
        self.add(layer, (kurtosis_BT - 3).nansum(), defined_BT.sum(), metric="kurtosis_excess")


class RotatedKurtosis(HiddenStatistics):
    """`kurtosis_rotated`, the `kurtosis` of Q x, Q OrthoAdam's rotation of the embedding's columns.

    Where it is high, low kurtosis of x shows nothing by itself (arXiv 2410.17174). Its lines also
    have "rotation" and "rotation_share".

    Args:
        model: a language model of transformers.
        kind: "hadamard" or "haar".
        seed: as OrthoAdam's.
        share: as OrthoAdam's; with "size" all matrices that read the stream have this Q too.
    """

    def __init__(self, model: Any, *, kind: str, seed: int, share: str = "parameter") -> None:
        super().__init__()
        self._about = {"rotation": kind, "rotation_share": share}
        # On the CPU it is made in float64; hidden states are float32 at most.
        table = model.get_input_embeddings().weight
        size = table.shape[-1]
        self._rotation = make_rotation(kind, seed=seed, size=size, device=model.device)
        self._signs = torch.ones(size, device=model.device)
        if share == "parameter":
            name = next(name for name, p in model.named_parameters() if p is table)
            self._signs = random_signs([sign_key(seed, name, -1)], size, model.device)[0]

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        super().observe(layer, self._rotation.apply(x_BTC.float() * self._signs))

    def measures(self) -> list[dict[str, Any]]:
        lines = [line for line in super().measures() if line["metric"] == "kurtosis"]
        return [{**line, "metric": "kurtosis_rotated", **self._about} for line in lines]


class ResidualStream(Means):
    """Statistics of all hidden states by layer, including the first layer's input.

    `hidden_top_…` and the median of |x| over all layers; `norm`, the mean √Σx² of a token;
    `similarity`, the mean cosine of two tokens of a text; `effective_rank` of the first few texts;
    outlier channels. A token that is not finite counts in `non_finite_tokens` alone.
    """

    over_layers = False

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, Sizes] = defaultdict(Sizes)
        self._peaks: dict[int, Tensor] = {}  # [2, C]: the largest |x| of the first token, and rest
        self._ranked: dict[int, int] = defaultdict(int)
        self._non_finite: dict[int, int] = defaultdict(int)

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        x = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        magnitude = x.abs()
        peak_BT = magnitude.amax(-1)
        finite_BT = peak_BT.isfinite()
        if not bool(finite_BT.all()):
            x, magnitude = (y.masked_fill(~finite_BT[..., None], 0.0) for y in (x, magnitude))
        self._non_finite[layer] += int((~finite_BT).sum())
        self._sizes[layer].add(magnitude, peak_BT)
        for offset in range(SAMPLED):  # every channel, in one token of so many
            part = slice(offset, None, SAMPLED)
            self._sizes[layer].count(magnitude[:, part, part][finite_BT[:, part]])
        nothing_1C = magnitude.new_zeros(1, magnitude.shape[-1])
        tops = [torch.cat([nothing_1C, magnitude[:, part].flatten(0, 1)]) for _, part in PARTS]
        peaks_2C = torch.stack([top.amax(0) for top in tops])
        self._peaks[layer] = torch.maximum(self._peaks.get(layer, peaks_2C), peaks_2C)
        norm_BT = torch.linalg.vector_norm(x, dim=-1)
        for tokens, part in PARTS:
            total = norm_BT[:, part].sum(dtype=torch.float64)
            self.add(layer, total, finite_BT[:, part].sum(), metric=f"norm_{tokens}")
        # Directions as one product a text: |Σ x/‖x‖|² = Σ_ij cos(x_i, x_j).
        weight_BT = torch.where(norm_BT > 0, 1 / norm_BT, 0)
        count_B = (weight_BT > 0).sum(-1).double()
        total_B = (weight_BT[:, None] @ x)[:, 0].double().square().sum(-1)
        pairs = (count_B * (count_B - 1)).sum()
        self.add(layer, (total_B - count_B).sum(), pairs, metric="similarity")
        for text in x[: max(0, RANKED - self._ranked[layer])]:
            self._ranked[layer] += 1
            for name, tokens in (("", text), ("_without_first", text[1:])):
                rank = torch.tensor(effective_rank(tokens))
                defined = int(not rank.isnan())
                self.add(layer, rank.nan_to_num(), defined, metric=f"effective_rank{name}")

    def measures(self) -> list[dict[str, Any]]:
        lines = super().measures()
        blocks = [sizes for layer, sizes in self._sizes.items() if layer != INPUT]
        if blocks:
            lines += Sizes(blocks).measures("hidden")
        bad = {layer: count for layer, count in sorted(self._non_finite.items()) if count}
        if bad:
            lines.append({"metric": "non_finite_tokens", "value": sum(bad.values())})
        return lines + [
            {"metric": "non_finite_tokens", "layer": layer, "value": count}
            for layer, count in bad.items()
        ]

    def outliers(self) -> list[dict[str, Any]]:
        """Payloads of "channel" records: channels whose largest |x| is at least `OUTLIER` × the
        layer's median |x|, largest first."""
        channels: dict[int, dict[str, Any]] = {}
        for layer, peaks_2C in sorted(self._peaks.items()):
            median, top_C = self._sizes[layer].median(), peaks_2C.amax(0)
            over_C = (top_C >= OUTLIER * median) & (median > 0)
            for channel in over_C.nonzero().flatten().tolist():
                new = {"channel": channel, "first_layer": layer, "largest": 0.0}
                line, value = channels.setdefault(channel, new), float(top_C[channel])
                if value > line["largest"]:
                    part, _ = PARTS[int(peaks_2C[0, channel] <= peaks_2C[1, channel])]
                    line |= {"largest": value, "layer": layer, "medians": value / median}
                    line["tokens"] = part
        ordered = sorted(channels.values(), key=lambda line: -line["medians"])
        return [{**line, "of": len(ordered)} for line in ordered[:LISTED]]


def effective_rank(x_TC: Tensor) -> float:
    """exp(H(p)), p the singular values of x normed to sum 1 (Roy and Vetterli, 2007), in float64;
    NaN for zeros and empty x."""
    if not x_TC.numel() or not bool(x_TC.isfinite().all()):
        return float("nan")
    x = x_TC.double().cpu()
    gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    # Below this, rounding of the Gram matrix.
    singular = singular[singular > singular[-1] * 1e-7]
    p = singular / singular.sum()
    return float(torch.special.entr(p).sum().exp()) if len(p) else float("nan")
