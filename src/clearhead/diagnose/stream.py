"""Hidden states by every definition in use: kurtosis, outliers, norm, similarity and rank.

Each kurtosis is of the output of a block, x [T, C] a text, and the definitions do not agree; so
each has a name of its own (`DEFINITIONS`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.diagnose.hidden import HiddenStatistics, kurtosis
from clearhead.diagnose.largest import Histogram, Largest, median_of, ranks_of, together
from clearhead.models.inspection import decoder_layers

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
INPUT = -1  # the layer number of the stream before the first block
RANKED = 4  # texts: effective rank takes an eigenvalue problem each
SAMPLED = 8  # of so many numbers one is in the median
OUTLIER = 30.0  # × the layer's median |x|; the largest of 10⁸ Gaussian numbers is at 8.5 ×
LISTED = 16  # channels


class StreamProfile:
    """Of all hidden states [B, T, C] seen, by layer; `INPUT` is the stream before the first block.

    Beside `DEFINITIONS`: the largest |x|, its ranks and the median, as in the Differential
    Transformer's Table 5 (all layers together, and by layer); `norm`, the mean √Σx² of a token,
    first and rest; `similarity`, the mean cosine of two tokens of a text; `effective_rank`,
    exp of the entropy of x's singular values normed to sum 1, of the first texts, uncentred, and
    the same without the first token; outlier channels. A token with a number that is not finite
    counts in `non_finite_tokens` and in nothing else.
    """

    def __init__(self) -> None:
        self.plain = HiddenStatistics()
        self.sums: dict[int, dict[str, Tensor]] = {}
        self.channels: dict[int, Tensor] = {}  # Σ x² by channel
        self.peaks: dict[int, Tensor] = {}  # [first and rest, C]: the largest |x|
        self.frames: dict[int, tuple[float, float]] = {}  # the first batch's mean and deviation
        self.largest: dict[int, Largest] = {}
        self.magnitudes: dict[int, Histogram] = {}
        self.ranks: dict[int, list[tuple[float, float]]] = {}

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the output of a block, or the stream before the first as layer `INPUT`."""
        x = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        magnitude = x.abs()
        peak = magnitude.amax(-1)
        finite = peak.isfinite()
        new = {"non_finite": (~finite).sum(), "tokens": finite.sum()}
        if not bool(finite.all()):
            x = x.masked_fill(~finite[..., None], 0.0)
            magnitude = x.abs()
        if layer != INPUT:
            shape = kurtosis(x)
            self.plain.observe_tokens(layer, peak, shape.masked_fill(~finite, torch.nan))
            new |= self._moments(layer, x, shape, finite)
            self.largest.setdefault(layer, Largest()).add(magnitude, peak)
            few = magnitude.flatten()[::SAMPLED]
            self.magnitudes.setdefault(layer, Histogram()).add(few)
        else:
            self.magnitudes.setdefault(layer, Histogram()).add(magnitude.flatten()[::SAMPLED])
        new |= _norms(x, finite)
        old = self.sums.setdefault(layer, {})
        for name, value in new.items():
            old[name] = old[name] + value if name in old else value
        self._channels(layer, x, magnitude)
        ranks = self.ranks.setdefault(layer, [])
        for text in x[: max(0, RANKED - len(ranks))]:
            ranks.append((effective_rank(text), effective_rank(text[1:])))

    def _moments(self, layer: int, x: Tensor, shape: Tensor, finite: Tensor) -> dict[str, Tensor]:
        """Sums over the tokens for each definition that is not per token and centred."""
        if layer not in self.frames:
            mean, std = float(x.mean()), float(x.std()) if x.numel() > 1 else 0.0
            # The deviation of equal numbers is rounding, and no unit.
            self.frames[layer] = (mean, std if std > 1e-6 * abs(mean) else abs(mean) or 1.0)
        centre, unit = self.frames[layer]
        # In the first batch's units: no fourth power overflows, and little cancels.
        y = ((x - centre) / unit).masked_fill_(~finite[..., None], 0.0)
        square = y * y
        sums = [y.sum(-1), square.sum(-1), (square * y).sum(-1), square.square_().sum(-1)]
        powers_4BT = torch.stack(sums).double()
        number = (finite.sum(-1) * x.shape[-1]).double()
        flat = _central_kurtosis(powers_4BT.sum(-1), number, unbiased=True)
        square = x * x
        raw = square.square().mean(-1) / x.var(-1).square() - 3  # not centred above, std below
        excess = shape.double() - 3
        usable, raw_usable = excess.isfinite() & finite, raw.isfinite() & finite
        return {
            "powers": powers_4BT.sum((1, 2)),
            "numbers": number.sum(),
            "flat": flat.nansum(),
            "flat_defined": (~flat.isnan()).sum(),
            "excess": torch.where(usable, excess, 0).sum(),
            "excess_defined": usable.sum(),
            "relu": torch.where(raw_usable, raw.clamp_min(0), 0).sum(dtype=torch.float64),
            "relu_defined": raw_usable.sum(),
        }

    def _channels(self, layer: int, x: Tensor, magnitude: Tensor) -> None:
        square_C = x.square().sum((0, 1)).double()
        nothing = magnitude.new_zeros(1, magnitude.shape[-1])
        first = torch.cat([nothing, magnitude[:, 0]]).amax(0)
        rest = torch.cat([nothing, magnitude[:, 1:].flatten(0, 1)]).amax(0)
        peaks = torch.stack([first, rest])
        if layer in self.channels:
            square_C = square_C + self.channels[layer]
            peaks = torch.maximum(peaks, self.peaks[layer])
        self.channels[layer], self.peaks[layer] = square_C, peaks

    def layers(self) -> list[int]:
        """The layers seen, in order, without `INPUT`."""
        return sorted(layer for layer in self.sums if layer != INPUT)

    def value(self, metric: str, layer: int) -> float:
        """A metric of one layer that is neither in `clearhead.diagnose.hidden` nor a rank."""
        sums = self.sums[layer]
        if metric == "kurtosis_neurons":
            s = self.channels[layer] / sums["tokens"].clamp_min(1)
            return float(s.square().mean() / s.mean().square())
        if metric == "kurtosis_pooled":
            return float(_central_kurtosis(sums["powers"], sums["numbers"]))
        if metric in ("effective_rank", "effective_rank_without_first"):
            found = [pair[metric != "effective_rank"] for pair in self.ranks[layer]]
            found = [value for value in found if not math.isnan(value)]
            return sum(found) / len(found) if found else math.nan
        total, count = _QUOTIENTS[metric]
        return float(sums[total] / sums[count])

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records."""
        out = self.plain.measures()
        layers = self.layers()
        for metric in list(DEFINITIONS)[1:]:
            values = {layer: self.value(metric, layer) for layer in layers}
            found = [value for value in values.values() if not math.isnan(value)]
            mean = sum(found) / len(found) if found else math.nan
            out.append({"metric": metric, "value": mean})
            out += [{"metric": metric, "layer": n, "value": value} for n, value in values.items()]
        for metric in (*_STREAM, "effective_rank", "effective_rank_without_first"):
            out += [
                {"metric": metric, "layer": layer, "value": self.value(metric, layer)}
                for layer in sorted(self.sums)
            ]
        whole = ranks_of(together([self.largest[layer] for layer in layers]))
        out += [{"metric": f"hidden_top_{rank}", "value": value} for rank, value in whole.items()]
        if layers:
            counts = torch.stack([self.magnitudes[layer].counts for layer in layers]).sum(0)
            out.append({"metric": "hidden_median", "value": median_of(counts)})
        bad = sum(int(sums["non_finite"]) for sums in self.sums.values())
        if bad:
            out.append({"metric": "non_finite_tokens", "value": bad})
            out += [
                {"metric": "non_finite_tokens", "layer": layer, "value": int(sums["non_finite"])}
                for layer, sums in sorted(self.sums.items())
                if int(sums["non_finite"])
            ]
        return out

    def outliers(self) -> list[dict[str, Any]]:
        """Payloads of "channel" records: channels whose largest |x| is at least `OUTLIER` × the
        layer's median |x|, with the layer where they first are, the largest first."""
        found: dict[int, dict[str, Any]] = {}
        for layer in sorted(self.peaks):
            median = self.magnitudes[layer].median()
            if not median > 0:
                continue
            first_C, rest_C = self.peaks[layer]
            peak_C = torch.maximum(first_C, rest_C)
            for channel in (peak_C >= OUTLIER * median).nonzero().flatten().tolist():
                value = float(peak_C[channel])
                line = found.setdefault(
                    channel, {"channel": channel, "first_layer": layer, "largest": 0.0}
                )
                if value > line["largest"]:
                    line["largest"], line["layer"] = value, layer
                    line["medians"] = value / median
                    line["tokens"] = "first" if first_C[channel] > rest_C[channel] else "rest"
        ordered = sorted(found.values(), key=lambda line: -line["medians"])
        return [{**line, "of": len(ordered)} for line in ordered[:LISTED]]


_QUOTIENTS = {
    "kurtosis_excess": ("excess", "excess_defined"),
    "kurtosis_excess_relu": ("relu", "relu_defined"),
    "kurtosis_flattened": ("flat", "flat_defined"),
    "norm_first": ("norm_first", "tokens_first"),
    "norm_rest": ("norm_rest", "tokens_rest"),
    "similarity": ("similarity", "pairs"),
}
_STREAM = ("norm_first", "norm_rest", "similarity")


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


@contextmanager
def stream_profile(model: Any) -> Iterator[StreamProfile]:
    """Observe the stream before the first block and after each, of all that runs in the body.

    Raises:
        ClearheadError: as `observing_stream`.
    """
    profile = StreamProfile()
    with observing_stream(model, profile.observe):
        yield profile


@contextmanager
def observing_stream(model: Any, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `observe` with the input of the first layer, as layer `INPUT`, and every layer's output.

    Raises:
        ClearheadError: as `clearhead.models.inspection.decoder_layers`.
    """
    layers = decoder_layers(model)

    def show(layer: int, x_BTC: Tensor) -> None:
        with torch.no_grad(), torch.autocast(x_BTC.device.type, enabled=False):
            observe(layer, x_BTC)

    def entered(module: nn.Module, arguments: Any, keywords: Any) -> None:
        x = arguments[0] if arguments else keywords.get("hidden_states")
        if isinstance(x, Tensor):
            show(INPUT, x)

    def left(layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            show(layer, output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [layers[0].register_forward_pre_hook(entered, with_kwargs=True)]
    handles += [layer.register_forward_hook(left(i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
