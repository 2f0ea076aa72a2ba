"""Outliers in the residual stream: kurtosis and largest activation at the output of every block.

Definitions of arXiv 2410.17174 (its Table 2), per token over the channels, then the mean over
tokens; the first token and the rest apart, since the first carries most of the outliers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import choose
from clearhead.models.inspection import decoder_layers

TOKENS = ("first", "rest")
METRICS = ("kurtosis", "largest_activation", "maximum_activation", "undefined_kurtosis")


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
    """Of all hidden states [B, T, C] seen, by layer; position 0 is "first", the others "rest".

    - `kurtosis`: the mean over tokens of `kurtosis` over channels, without those undefined.
    - `largest_activation`: the mean over tokens of the largest |x| over channels.
    - `maximum_activation`: the largest |x| of any token.
    - `undefined_kurtosis`: the number of tokens without a kurtosis (constant, infinite or NaN).

    A metric of no tokens is NaN.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], dict[str, Tensor]] = {}

    def layers(self) -> list[int]:
        """The layers seen, in order."""
        return sorted({layer for layer, _ in self._sums})

    def value(self, metric: str, tokens: str, layer: int | None = None) -> float:
        """A metric of one layer; or over layers the mean, the maximum, or the number in all."""
        choose("metric", metric, METRICS)
        choose("tokens", tokens, TOKENS)
        if layer is not None:
            return self._of_layer(metric, tokens, layer)
        values = torch.tensor(
            [self._of_layer(metric, tokens, index) for index in self.layers()], dtype=torch.float64
        )
        if metric == "undefined_kurtosis":
            return float(values.sum())
        if metric == "maximum_activation":
            return float(values.amax()) if len(values) else torch.nan
        # A layer whose every token is constant has no kurtosis; the others still have their mean.
        return float(values.nanmean() if metric == "kurtosis" else values.mean())

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: over all layers, and by layer.

        Where some tokens had no kurtosis, its payload says how many under "undefined".
        """
        out: list[dict[str, Any]] = []
        for metric in METRICS[:-1]:
            for tokens in TOKENS:
                for layer in (None, *self.layers()):
                    line: dict[str, Any] = {"metric": metric, "tokens": tokens}
                    line["value"] = self.value(metric, tokens, layer)
                    if layer is not None:
                        line["layer"] = layer
                    undefined = self.value("undefined_kurtosis", tokens, layer)
                    if metric == "kurtosis" and undefined:
                        line["undefined"] = int(undefined)
                    out.append(line)
        return out

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the output of a layer."""
        self.observe_tokens(layer, x_BTC.abs().amax(-1), kurtosis(x_BTC))

    def observe_tokens(self, layer: int, largest_BT: Tensor, kurtosis_BT: Tensor) -> None:
        """Add the largest |x| and the kurtosis of every token."""
        largest, shape = largest_BT.double(), kurtosis_BT.double()
        for tokens, part in (("first", slice(0, 1)), ("rest", slice(1, None))):
            undefined = shape[:, part].isnan()
            new = {
                "kurtosis": shape[:, part].nansum(),
                "defined": (~undefined).sum(),
                "undefined": undefined.sum(),
                "largest": largest[:, part].sum(),
                "maximum": torch.cat([largest.new_zeros(1), largest[:, part].flatten()]).amax(),
            }
            old = self._sums.setdefault((layer, tokens), {})
            for name, value in new.items():
                add = torch.maximum if name == "maximum" else torch.add
                old[name] = add(old[name], value) if name in old else value

    def _of_layer(self, metric: str, tokens: str, layer: int) -> float:
        sums = self._sums[layer, tokens]
        count = sums["defined"] + sums["undefined"]
        values = {
            "kurtosis": sums["kurtosis"] / sums["defined"],
            "largest_activation": sums["largest"] / count,
            "maximum_activation": torch.where(count == 0, torch.nan, sums["maximum"]),
            "undefined_kurtosis": sums["undefined"],
        }
        return float(values[metric])


@contextmanager
def hidden_statistics(model: Any) -> Iterator[HiddenStatistics]:
    """Observe the output of every decoder layer of all that `model` is run on in the body.

    Memory: a few copies of one layer's output, in float32.

    Raises:
        ClearheadError: as `clearhead.models.inspection.decoder_layers`.
    """
    statistics = HiddenStatistics()

    def hook(layer: int) -> Any:
        def observe(module: nn.Module, arguments: Any, output: Any) -> None:
            x_BTC = output[0] if isinstance(output, tuple) else output
            with torch.no_grad(), torch.autocast(x_BTC.device.type, enabled=False):
                statistics.observe(layer, x_BTC)

        return observe

    handles = [
        layer.register_forward_hook(hook(index))
        for index, layer in enumerate(decoder_layers(model))
    ]
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()
