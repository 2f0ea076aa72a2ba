"""Attention of one layer: prepare → attend → combine, around the mechanisms of its axes."""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.errors import ClearheadError, first_line
from clearhead.nn import bases
from clearhead.nn.bases import Attend, Interface, PositionTables, Scores, SingleMaps, Softmax
from clearhead.nn.init import fixed_normal, starting
from clearhead.nn.registry import REGISTRY
from clearhead.nn.shaping import SkipInit
from clearhead.ops.requests import repeat
from clearhead.ops.rope import Rotation
from clearhead.ops.visibility import Visibility
from clearhead.spec import LayerSpec

Prefixes = MutableMapping[int, tuple[Tensor, Tensor]]  # prepared keys, and values, by layer


class Attention(nn.Module):
    """Projections around the mechanisms that the layer's axes name; None where one does nothing.

    Keys are cached as prepared, or with `cache_unrotated` as projected, and prepared when read.
    Where values have more heads than keys, the heads of a group share its key.
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer
        chosen = REGISTRY.of(layer)
        position: Any = chosen["position"].build
        scores, maps = chosen["scores"], chosen["maps"]
        queries, groups = maps.query_heads(layer), layer.num_key_value_heads
        hidden, bias = layer.hidden_size, layer.bias
        self.q_proj = nn.Linear(hidden, queries * scores.query_width(layer), bias=bias)
        self.k_proj = nn.Linear(hidden, groups * scores.key_width(layer), bias=bias)
        self.v_proj = chosen["values"].build(layer)
        self.o_proj = chosen["projections"].build(layer)
        self.q_norm = chosen["qk_norm"].build(layer, scores.query_width(layer))
        self.k_norm = chosen["qk_norm"].build(layer, scores.key_width(layer))
        self.scores: Scores = scores.build(layer, position.prepare)
        self.cache_unrotated = self.scores.cache_unrotated or position.cache_unrotated(layer)
        heads = maps.heads(layer)
        self.decay = position.decay(layer, heads)
        self.wide_factors = position.wide_factors
        self.maps: Any = maps.build(layer)  # a SingleMaps itself is not called
        self.combines = type(self.maps) is not SingleMaps
        together = self.maps.keys_together
        self.normalizer: Softmax | None = chosen["normalizer"].build(layer, queries, together)
        own = self.normalizer or Softmax
        self.attend: Attend = own.attend
        self.weights, self.as_softmax = own.weights, own.as_softmax
        self.shaping: SkipInit | None = chosen["shaping"].build(layer, heads)
        self.epilogue: bases.Epilogue | None = chosen["epilogue"].build(layer, heads)
        if self.shaping is not None or layer.query_range is not None:
            starting(self.q_proj, partial(fixed_normal, own=layer.query_range or 0.0))
        self.causal: bool = chosen["direction"].build()
        self.window = layer.sliding_window
        self.prefix_length = 0 if self.normalizer is None else self.normalizer.prefix_length
        self.heads, self.groups, self.value_heads = queries, groups, layer.num_value_heads
        self.width_of_head = layer.width // heads

    def forward(
        self,
        x_BTC: Tensor,
        *,
        tables: PositionTables,
        interface: Interface | None = None,
        cache: Any = None,
        past: int = 0,
        prefixes: Prefixes | None = None,
        visibility: Visibility = Visibility(),  # noqa: B008 (a frozen value)
    ) -> Tensor:
        """[B, T, C] → [B, T, C], with a cache of `past` tokens and their prepared prefixes.

        `interface` replaces `attend`. The visibility is that of all S = past + T keys, whatever the
        layer's own window.
        """
        batch, new, _ = x_BTC.shape
        q = self.q_proj(x_BTC).view(batch, new, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x_BTC).view(batch, new, self.groups, -1).transpose(1, 2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        dtype = k.dtype
        if self.wide_factors and dtype == torch.float16:
            q, k = q.float(), k.float()
        if self.decay is not None:
            k = self.decay.with_gates(k, x_BTC)
        own_BTC = self.v_proj(x_BTC)
        v_BTC = own_BTC.to(k.dtype)  # unprojected values are wider under autocast
        if not self.cache_unrotated:
            k = self.scores.keys(k, tables.keys)
        if cache is None:
            v = v_BTC.view(batch, new, self.value_heads, -1).transpose(1, 2)
        else:
            k, v = self._remembered(cache, k, v_BTC, past + new)
        dropped = past + new - k.shape[2]  # early keys, by a sliding cache
        if dropped:
            visibility = visibility.of_keys(dropped)
        if visibility.window != self.window:
            visibility = visibility._replace(window=self.window)
        if self.decay is not None:
            k, tables = self.decay.columns(k, new, visibility)

        lambdas = self.maps.lambdas(x_BTC) if self.combines else None
        attend = self.attend
        if interface is not None:
            attend = partial(interface, self, lambdas=lambdas)
        prefix = self._prefix(tables.prefix, v, past, prefixes) if self.prefix_length else None
        if self.cache_unrotated:
            whole, rotation = self.scores.attend_unrotated, tables.keys
            alone = new == 1 and prefix is None and isinstance(rotation, Rotation)
            if alone and whole is not None and attend is ops.attend:
                attend = partial(whole, attend=attend, rotation=rotation)
            else:
                k = self.scores.keys(k, _last(tables.keys, k.shape[2]))
        if k.shape[1] != v.shape[1]:
            k = repeat(k, v.shape[1], self.maps.keys_together)
        prepared = self.scores.queries(q, tables.queries)
        options: dict[str, Any] = {
            "visibility": visibility,
            "sink": None if self.normalizer is None else self.normalizer.sink(q),
            "prefix": prefix,
            "scale": self.layer.head_dim**-0.5,
        }
        if self.combines:
            o_BHTD = self.maps(prepared, k, v, lambdas, attend=attend, **options)
        else:
            o_BHTD = attend(prepared, k, v, **options)
        o_BTC = o_BHTD.transpose(1, 2).flatten(2).to(dtype)

        if self.shaping is not None:
            cached = v if past or dropped else None
            centring = partial(self._centring, cached, visibility, lambdas)
            o_BTC = self.shaping(own_BTC, o_BTC, centring)
        if self.epilogue is not None:
            o_BTC = self.epilogue(o_BTC, x_BTC, partial(self._own, own_BTC))
        return self.o_proj(o_BTC)

    def _centring(
        self, cached: Tensor | None, visibility: Visibility, lambdas: Tensor | None, x_BTHD: Tensor
    ) -> Tensor:
        """C x [B, T, heads, width], over `cached` values [B, G, S, D] or the tokens' own."""
        new = x_BTHD.shape[1]
        # Side by side, the heads are one: their sums need no copy.
        values = x_BTHD.flatten(2)[:, None] if cached is None else cached
        mean, count_BT = ops.running_mean(values, new, visibility)
        mass = None if self.normalizer is None else self.normalizer.row_sum(count_BT)
        mass = self.maps.row_sum(mass, lambdas)
        mean = mean.transpose(1, 2).reshape(mean.shape[0], new, -1, self.width_of_head)
        return mean if mass is None else mean * (mass.transpose(1, 2) if mass.ndim else mass)

    def _own(self, own_BTC: Tensor) -> Tensor:
        """Each token's own values, repeated for the heads that share one: [B, T, H · D]."""
        value = own_BTC.unflatten(-1, (self.value_heads, -1)).transpose(1, 2)
        value = repeat(value, self.layer.num_attention_heads, self.maps.keys_together)
        return value.transpose(1, 2).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, lambdas: Tensor | None, alone: Callable[[], Tensor], first: int
    ) -> Tensor:
        """The matrix [B, heads, R, S] that multiplies the values, for R of the queries.

        From their maps in `attend`'s order, `maps.lambdas`, the maps at W_Q = 0, and the index of
        the first query's own key.
        """
        weights = self.maps.effective_weights(weights_BHRS, lambdas)
        if self.shaping is None:
            return weights
        rows, keys = weights.shape[-2:]
        own = torch.eye(rows, keys + rows, dtype=weights.dtype, device=weights.device)
        own = own.roll(first, 1)[:, :keys]
        return self.shaping.effective_weights(
            weights, own, lambda: self.maps.effective_weights(alone(), lambdas)
        )

    def _prefix(
        self, table: Any, v_BGSD: Tensor, past: int, prefixes: Prefixes | None
    ) -> tuple[Tensor, Tensor]:
        """The prefix's keys with their positions, one for each value, and its values."""
        batch, prefix = v_BGSD.shape[0], None
        keeps = prefixes is not None and not (self.cache_unrotated or torch.is_grad_enabled())
        if keeps and past:
            prefix = prefixes.get(self.layer.index)  # type: ignore[union-attr]
        if prefix is None:
            own: Any = self.normalizer.prefix()  # type: ignore[union-attr]
            key_GND, value_GND = (x.to(v_BGSD.dtype) for x in own)
            rows = batch if self.cache_unrotated else 1
            key_BGND = self.scores.keys(key_GND.expand(rows, -1, -1, -1), table)
            key_BGND = repeat(key_BGND, v_BGSD.shape[1], self.maps.keys_together)
            prefix = key_BGND, value_GND[None]
            if keeps:
                prefixes[self.layer.index] = prefix  # type: ignore[index]
        key_BGND, value_BGNV = (x.to(v_BGSD.dtype) for x in prefix)  # autocast may come or go
        return key_BGND.expand(batch, -1, -1, -1), value_BGNV.expand(batch, -1, -1, -1)

    def _remembered(self, cache: Any, k: Tensor, v_BTC: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """All keys and values so far, or the last of them, where a window reaches no further.

        A static cache takes its number of heads from the keys: values that share one lie side by
        side in it.
        """
        v = v_BTC.unflatten(-1, (self.groups, -1)).transpose(1, 2)
        new = k.shape, v.shape
        needed = keys if self.window is None else min(keys, k.shape[2] + self.window - 1)
        try:
            k, v = cache.update(k, v, self.layer.index)
        except (RuntimeError, IndexError) as error:
            reason = f"({first_line(error)}): start a new one"
            raise ClearheadError(f"the cache has no room for {keys} tokens {reason}") from error
        for held, given in zip((k.shape, v.shape), new, strict=True):
            if (*held[:2], held[3]) != (*given[:2], given[3]) or held[2] < needed:
                wanted = [*given[:2], keys, given[3]]
                raise ClearheadError(
                    f"the cache holds {list(held)} where this model needs {wanted}: it is another "
                    "model's or another batch's; start a new one"
                )
        compiled = torch.compiler.is_compiling()
        if compiled or k.shape[2] > keys:
            k, v = k[:, :, :keys], v[:, :, :keys]
        if compiled or self.value_heads != self.groups:
            # A compiler learns by it that there are as many values as keys.
            v = v.unflatten(-1, (self.value_heads // self.groups, -1)).transpose(2, 3).flatten(1, 2)
        return k, v


def _last(table: Any, keys: int) -> Any:
    """A table, or several, of the last keys: a cache has dropped those before."""
    if isinstance(table, Rotation):
        table = table.table()
    if isinstance(table, tuple):
        return tuple(_last(part, keys) for part in table)
    return table if table is None else table[..., -keys:, :]
