"""Statistics of the residual stream: kurtosis, outliers, norm, similarity and rank.

Definitions of kurtosis in the literature differ by orders of magnitude on the same model; each has
its own name here (`DEFINITIONS`). x [T, C] is the output of a layer for one text.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.quotients import over_layers
from clearhead.diagnose.streaming_topk import Histogram, RunningTopK, median_of, merge, ranks_of
from clearhead.probe.observation import INPUT

DEFINITIONS = {
    "kurtosis": "E[(x−µ)⁴] / E[(x−µ)²]² per token over channels, mean over tokens: raw, 3 for a "
    "Gaussian; first token and rest apart (arXiv 2410.17174)",
    "kurtosis_excess": "the same of every token, less 3",
    "kurtosis_excess_relu": "relu(mean(x⁴) / std(x)⁴ − 3) per token, not centred, mean over tokens "
    "(arXiv 2506.19697)",
    "kurtosis_pooled": "of all numbers of all tokens together: raw",
    "kurtosis_flattened": "of the T × C numbers of a text together, with the unbiased deviation, "
    "mean over texts: raw (arXiv 2306.12929)",
    "kurtosis_neurons": "mean(s²) / mean(s)² over channels, s the mean of x² over tokens: 1 for "
    "equal channels, at most C (arXiv 2405.19279)",
}
RANKED = 4  # texts: effective rank takes an eigenvalue problem each
SAMPLED = 8  # of so many numbers one is in the median
OUTLIER = 30.0  # × the layer's median |x|; the largest of 10⁸ Gaussian numbers is at 8.5 ×
LISTED = 16  # channels


class _Layer:
    """Sums over the hidden states of one layer."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = defaultdict(int)
        self.squares_C: Any = 0  # Σ x² by channel
        self.peaks_2C: Tensor | None = None  # the largest |x| of the first token and of the rest
        self.frame: tuple[float, float] | None = None  # the first batch's mean and deviation
        self.largest = RunningTopK()
        self.magnitudes = Histogram()
        self.ranks: list[tuple[float, float]] = []

    def value(self, metric: str) -> float:
        if metric == "kurtosis_neurons":
            s = self.squares_C / self.sums["tokens"].clamp_min(1)
            return float(s.square().mean() / s.mean().square())
        if metric == "kurtosis_pooled":
            return float(_central_kurtosis(self.sums["powers"], self.sums["numbers"]))
        if metric in _RANKS:
            ranks = torch.tensor([pair[_RANKS.index(metric)] for pair in self.ranks])
            return float(ranks.double().nanmean())
        total, count = _QUOTIENTS[metric]
        return float(self.sums[total] / self.sums[count])


class ResidualStream:
    """Statistics of all hidden states [B, T, C], by layer, also of those before the first layer.

    Beside `DEFINITIONS`: ranks of the largest |x| and the median, as in the Differential
    Transformer's Table 5 (all layers together, and by layer); `norm`, the mean √Σx² of a token,
    first and rest; `similarity`, the mean cosine of two tokens of a text; `effective_rank`,
    exp of the entropy of x's singular values normed to sum 1, of the first texts, uncentred, and
    the same without the first token; outlier channels. A token with a number that is not finite
    counts in `non_finite_tokens` and in nothing else.
    """

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = defaultdict(_Layer)

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the output of a layer, or the input of the first as layer `INPUT`."""
        sums = self._layers[layer]
        x = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        magnitude = x.abs()
        peak = magnitude.amax(-1)
        finite = peak.isfinite()
        if not bool(finite.all()):
            x = x.masked_fill(~finite[..., None], 0.0)
            magnitude = x.abs()
        new = {"non_finite": (~finite).sum(), "tokens": finite.sum(), **_norms(x, finite)}
        if layer != INPUT:
            new |= _moments(sums, x, finite)
            sums.largest.add(magnitude, peak)
        for name, value in new.items():
            sums.sums[name] += value
        for offset in range(SAMPLED):  # every channel, in one token of so many
            part = slice(offset, None, SAMPLED)
            sums.magnitudes.add(magnitude[:, part, part][finite[:, part]])
        sums.squares_C = sums.squares_C + x.square().sum((0, 1)).double()
        nothing_1C = magnitude.new_zeros(1, magnitude.shape[-1])
        rest = torch.cat([nothing_1C, magnitude[:, 1:].flatten(0, 1)])
        first = torch.cat([nothing_1C, magnitude[:, 0]])
        peaks_2C = torch.stack([first.amax(0), rest.amax(0)])
        sums.peaks_2C = peaks_2C if sums.peaks_2C is None else sums.peaks_2C.maximum(peaks_2C)
        for text in x[: max(0, RANKED - len(sums.ranks))]:
            sums.ranks.append((effective_rank(text), effective_rank(text[1:])))

    def measures(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        blocks = {layer: sums for layer, sums in sorted(self._layers.items()) if layer != INPUT}
        for metric in list(DEFINITIONS)[2:]:
            values = {layer: sums.value(metric) for layer, sums in blocks.items()}
            out += over_layers(values, metric=metric)
        out += [
            {"metric": metric, "layer": layer, "value": sums.value(metric)}
            for metric in (*_STREAM, *_RANKS)
            for layer, sums in sorted(self._layers.items())
        ]
        ranks = ranks_of(merge([sums.largest for sums in blocks.values()]))
        out += [{"metric": f"hidden_top_{rank}", "value": value} for rank, value in ranks.items()]
        if blocks:
            counts = torch.stack([sums.magnitudes.counts for sums in blocks.values()]).sum(0)
            out.append({"metric": "hidden_median", "value": median_of(counts)})
        bad = {layer: int(s.sums["non_finite"]) for layer, s in sorted(self._layers.items())}
        if any(bad.values()):
            out.append({"metric": "non_finite_tokens", "value": sum(bad.values())})
            out += [
                {"metric": "non_finite_tokens", "layer": layer, "value": count}
                for layer, count in bad.items()
                if count
            ]
        return out

    def outliers(self) -> list[dict[str, Any]]:
        """Payloads of "channel" records: channels whose largest |x| is at least `OUTLIER` × the
        layer's median |x|, with the layer where they first are, largest first."""
        channels: dict[int, dict[str, Any]] = {}
        for layer, sums in sorted(self._layers.items()):
            median = sums.magnitudes.median()
            if sums.peaks_2C is None or not median > 0:
                continue
            first_C, rest_C = sums.peaks_2C
            peak_C = torch.maximum(first_C, rest_C)
            for channel in (peak_C >= OUTLIER * median).nonzero().flatten().tolist():
                value = float(peak_C[channel])
                line = channels.setdefault(
                    channel, {"channel": channel, "first_layer": layer, "largest": 0.0}
                )
                if value > line["largest"]:
                    line["largest"], line["layer"] = value, layer
                    line["medians"] = value / median
                    line["tokens"] = "first" if first_C[channel] > rest_C[channel] else "rest"
        ordered = sorted(channels.values(), key=lambda line: -line["medians"])
        return [{**line, "of": len(ordered)} for line in ordered[:LISTED]]


_QUOTIENTS = {
    "kurtosis_excess_relu": ("relu", "relu_defined"),
    "kurtosis_flattened": ("flat", "flat_defined"),
    "norm_first": ("norm_first", "tokens_first"),
    "norm_rest": ("norm_rest", "tokens_rest"),
    "similarity": ("similarity", "pairs"),
}
_STREAM = ("norm_first", "norm_rest", "similarity")
_RANKS = ("effective_rank", "effective_rank_without_first")


def effective_rank(x_TC: Tensor) -> float:
    """exp(H(p)), p the singular values of x normed to sum 1 (Roy and Vetterli, 2007).

    From the eigenvalues of the smaller Gram matrix in float64. NaN for zeros and empty x.
    """
    if not x_TC.numel() or not bool(x_TC.isfinite().all()):
        return math.nan
    x = x_TC.double().cpu()
    gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    # Below this, rounding of the Gram matrix.
    singular = singular[singular > singular[-1] * 1e-7]
    if not len(singular):
        return math.nan
    p = singular / singular.sum()
    return float(torch.exp(-(p * p.log()).sum()))


def _moments(layer: _Layer, x: Tensor, finite: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens for each definition that is not per token and centred."""
    if layer.frame is None:
        mean, std = float(x.mean()), float(x.std()) if x.numel() > 1 else 0.0
        # The deviation of equal numbers is rounding, and no unit.
        layer.frame = (mean, std if std > 1e-6 * abs(mean) else abs(mean) or 1.0)
    centre, unit = layer.frame
    # In the first batch's units: no fourth power overflows, and little cancels.
    y = ((x - centre) / unit).masked_fill_(~finite[..., None], 0.0)
    square = y * y
    sums = [y.sum(-1), square.sum(-1), (square * y).sum(-1), square.square_().sum(-1)]
    powers_4BT = torch.stack(sums).double()
    number = (finite.sum(-1) * x.shape[-1]).double()
    flat = _central_kurtosis(powers_4BT.sum(-1), number, unbiased=True)
    square = x * x
    raw = square.square().mean(-1) / x.var(-1).square() - 3  # not centred above, std below
    usable = raw.isfinite() & finite
    return {
        "powers": powers_4BT.sum((1, 2)),
        "numbers": number.sum(),
        "flat": flat.nansum(),
        "flat_defined": (~flat.isnan()).sum(),
        "relu": torch.where(usable, raw.clamp_min(0), 0).sum(dtype=torch.float64),
        "relu_defined": usable.sum(),
    }


def _norms(x_BTC: Tensor, finite_BT: Tensor) -> dict[str, Tensor]:
    norm_BT = torch.linalg.vector_norm(x_BTC, dim=-1)
    # Directions as one product a text: |Σ x/‖x‖|² = Σ_ij cos(x_i, x_j).
    weight_BT = torch.where(norm_BT > 0, 1 / norm_BT, 0)
    count = (weight_BT > 0).sum(-1).double()
    total = (weight_BT[:, None] @ x_BTC)[:, 0].double().square().sum(-1)
    return {
        "norm_first": norm_BT[:, 0].sum(dtype=torch.float64),
        "tokens_first": finite_BT[:, 0].sum(),
        "norm_rest": norm_BT[:, 1:].sum(dtype=torch.float64),
        "tokens_rest": finite_BT[:, 1:].sum(),
        "similarity": (total - count).sum(),
        "pairs": (count * (count - 1)).sum(),
    }


def _central_kurtosis(powers: Tensor, number: Tensor, unbiased: bool = False) -> Tensor:
    """From Σy, Σy², Σy³, Σy⁴, float64 [4, ...]; NaN for equal numbers."""
    mean, second, third, fourth = powers / number
    variance = second - mean.square()
    above = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean**4
    if unbiased:
        variance = variance * number / (number - 1)
    # What is left of equal numbers is rounding.
    flat = ~(variance > 1e-9 * second.clamp_min(1e-300))
    return (above / variance.square()).masked_fill(flat, torch.nan)
