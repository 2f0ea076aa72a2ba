"""What a model does while it reads one text: attention maps, and hidden states token by token."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.attention import named_maps
from clearhead.diagnose.maps import PLAIN, maps_of
from clearhead.diagnose.stream import INPUT
from clearhead.diagnose.weights import AttentionCall
from clearhead.view.heads import Head

STATISTICS = ("first_token_share", "null_mass", "entropy", "negative_share")
# Of the maps of all heads together, in weights: 30 layers of 9 heads on 256 tokens fit.
WEIGHTS = 9_000_000


class AttentionTrace:
    """Statistics of every head, and whole maps of the heads that there is room for.

    By layer, map and head, as means over the queries:

    - `first_token_share`: 1/k where the first token is one of the query's k largest weights,
      otherwise 0.
    - `null_mass`: the weight on no key; only where a sink stands beside the keys.
    - `entropy`: of the weights and the null key's, in nats; only of maps without negative weights.
    - `negative_share`: the part of Σ|weight| that is negative; only of signed maps.

    Args:
        length: of the text, in tokens.
        chosen: the heads whose maps are kept. Unless given: of all heads, or of none where they
            would hold more than `WEIGHTS` weights (`full`).
    """

    def __init__(self, length: int, chosen: Collection[Head] | None = None) -> None:
        self.length, self.chosen = length, chosen
        self.causal = True
        self.full = False
        self.maps: dict[tuple[Head, str], Tensor] = {}  # [T, T]
        self.nulls: dict[tuple[Head, str], Tensor] = {}  # [T]
        self.lambdas: dict[int, Tensor] = {}  # a scalar or [heads, T]
        self.names: dict[int, tuple[str, ...]] = {}
        self._sums: dict[tuple[int, str], dict[str, Tensor]] = {}  # [2, heads]

    def observe(self, call: AttentionCall) -> None:
        """Add one layer's attention to the text, the first of the batch."""
        before = call.k.shape[2] - call.q.shape[2] if call.causal else 0
        for tile in call.tiles():
            rows = slice(before + tile.start, before + tile.start + tile.weights.shape[2])
            parts = list(named_maps(call, tile))
            self.names[call.layer] = tuple(name for name, *_ in parts)
            counted = tile.visible[0].any(-1).cpu()
            keys = torch.arange(tile.weights.shape[3], device=tile.weights.device)
            queries = torch.arange(rows.start, rows.stop, device=tile.weights.device)
            self.causal &= not bool((tile.visible[0] & (keys > queries[:, None])).any())
            for name, weights, null in parts:
                own = weights[0].float().cpu()
                own_null = None if null is None else null[0].float().cpu()
                shown = own.masked_fill(~tile.visible[0].cpu(), -torch.inf)
                self._add(call.layer, name, shown, own_null, counted)
                self._keep(call.layer, name, rows, own, own_null)
        self._note_lambdas(call, before)

    def statistic(self, name: str) -> dict[str, dict[Head, float]]:
        """Map → head → value."""
        found: dict[str, dict[Head, float]] = {}
        for (layer, map), sums in sorted(self._sums.items()):
            if name in sums:
                total, weight = sums[name]
                for head, value in enumerate((total / weight.clamp_min(1e-30)).tolist()):
                    found.setdefault(map, {})[Head(layer, head)] = value
        return found

    def heads(self) -> list[Head]:
        """Every head that was observed, layer by layer."""
        return list(dict.fromkeys(h for v in self.statistic(STATISTICS[0]).values() for h in v))

    def _add(
        self, layer: int, map: str, shown_HRS: Tensor, null_HR: Tensor | None, counted: Tensor
    ) -> None:
        weights = shown_HRS.masked_fill(shown_HRS == -torch.inf, 0.0)
        largest = shown_HRS.amax(-1)
        ties = (shown_HRS == largest[..., None]).sum(-1)
        first = ((shown_HRS[..., 0] == largest) / ties).masked_fill(~counted, 0.0)
        count = counted.expand(first.shape).sum(-1)
        new = {"first_token_share": torch.stack([first.sum(-1), count])}
        if null_HR is not None:
            new["null_mass"] = torch.stack([(null_HR * counted).sum(-1), count])
        negative = weights.clamp(max=0.0).sum((-1, -2)).neg()
        if map == PLAIN or map.startswith("map "):
            entropy = torch.special.entr(weights).sum(-1)
            if null_HR is not None:
                entropy += torch.special.entr(null_HR)
            new["entropy"] = torch.stack([(entropy * counted).sum(-1), count])
        else:
            new["negative_share"] = torch.stack([negative, weights.abs().sum((-1, -2))])
        sums = self._sums.setdefault((layer, map), {})
        for name, value in new.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()

    def _keep(
        self, layer: int, map: str, rows: slice, weights_HRS: Tensor, null_HR: Tensor | None
    ) -> None:
        heads, _, keys = weights_HRS.shape
        for index in range(heads):
            place = (Head(layer, index), map)
            if self.full or (self.chosen is not None and place[0] not in self.chosen):
                continue
            if place not in self.maps:
                if self.chosen is None and (len(self.maps) + 1) * self.weights_of_map > WEIGHTS:
                    self.full = True
                    self.maps.clear()
                    self.nulls.clear()
                    continue
                self.maps[place] = torch.zeros(self.length, self.length)
            self.maps[place][rows, :keys] = weights_HRS[index]
            if null_HR is not None:
                null_T = self.nulls.setdefault(place, torch.zeros(self.length))
                null_T[rows] = null_HR[index]

    @property
    def weights_of_map(self) -> int:
        """The weights that are packed of one map."""
        return self.length * (self.length + 1) // 2 if self.causal else self.length**2

    def _note_lambdas(self, call: AttentionCall, before: int) -> None:
        lambdas = maps_of(call).lambdas
        if lambdas is None:
            return
        if lambdas.ndim < 3:
            self.lambdas[call.layer] = lambdas.detach().float().reshape(-1)[0].cpu()
            return
        own_HT = lambdas[0, :, :, 0].detach().float().cpu()
        whole = self.lambdas.setdefault(call.layer, torch.zeros(len(own_HT), self.length))
        whole[:, before : before + own_HT.shape[1]] = own_HT


class HiddenTrace:
    """Hidden states before the first layer and after each, token by token.

    Attributes:
        norms: layer → ‖x‖ of each token, [T].
        largest: layer → the largest |x| of each token ÷ the median |x| of the layer, [T].
        channels: layer → where the largest |x| is, [T].
        read: called with (layer, x [T, C]).
    """

    def __init__(self, read: Any = None) -> None:
        self.norms: dict[int, Tensor] = {}
        self.largest: dict[int, Tensor] = {}
        self.channels: dict[int, Tensor] = {}
        self.read = read

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the text, the first of the batch."""
        x = x_BTC[0].float()
        magnitude = x.abs()
        peak, channel = magnitude.max(-1)
        self.norms[layer] = torch.linalg.vector_norm(x, dim=-1).cpu()
        self.largest[layer] = (peak / magnitude.median().clamp_min(1e-30)).cpu()
        self.channels[layer] = channel.cpu()
        if self.read is not None:
            self.read(layer, x_BTC[0])

    def layers(self) -> list[int]:
        """The layers seen, `INPUT` first."""
        assert min(self.norms, default=INPUT) == INPUT
        return sorted(self.norms)
