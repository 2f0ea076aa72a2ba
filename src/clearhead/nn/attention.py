"""Attention of one layer: prepare → attend → combine, around the mechanisms of its axes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.nn.init import fixed_normal, starting
from clearhead.nn.protocols import (
    Attend,
    CentringTerm,
    Decay,
    Epilogue,
    Maps,
    Normalizer,
    PositionTables,
    Scores,
    Shaping,
)
from clearhead.nn.registry import REGISTRY
from clearhead.ops import layouts
from clearhead.ops.rope import Rotation
from clearhead.ops.visibility import Visibility
from clearhead.spec import LayerSpec


class Attention(nn.Module):
    """Projections around the mechanisms that the layer's axes name.

    Differential attention pairs neighbouring heads of the baseline's queries, keys and values
    instead of adding any; V2 has twice its queries. Collinear scores have keys of half the width.
    The output is as wide for every choice. Where values have more heads than keys, the heads of a
    group share its key and have a value each.

    Attributes:
        cache_unrotated: whether keys are cached as projected and prepared when read, by the
            positions of all keys; else they are cached as prepared, by the positions of the new
            ones.
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer
        position: Any = REGISTRY.find("position", layer.position).build
        scores, maps = REGISTRY.find("scores", layer.scores), REGISTRY.find("maps", layer.maps)
        queries, groups = maps.query_heads(layer), layer.num_key_value_heads
        hidden, bias = layer.hidden_size, layer.bias
        self.q_proj = nn.Linear(hidden, queries * scores.query_width(layer), bias=bias)
        self.k_proj = nn.Linear(hidden, groups * scores.key_width(layer), bias=bias)
        self.v_proj = REGISTRY.find("values", layer.values).build(layer)
        self.o_proj = REGISTRY.find("projections", layer.projections).build(layer)
        norm = REGISTRY.find("qk_norm", layer.qk_norm).build
        self.q_norm, self.k_norm = (
            norm(layer, width(layer)) for width in (scores.query_width, scores.key_width)
        )
        self.scores: Scores = scores.build(position.prepare)
        self.cache_unrotated = self.scores.cache_unrotated or position.cache_unrotated(layer)
        self.decay: Decay | None = position.decay(layer, maps.heads(layer))
        self.attention_at_init = position.attention_at_init
        self.position_only = position.position_only
        self.wide_factors = position.wide_factors
        self.maps: Maps = maps.build(layer)
        normalizer = REGISTRY.find("normalizer", layer.normalizer).build
        self.normalizer: Normalizer = normalizer(layer, queries, self.maps.keys_together)
        shaping = REGISTRY.find("shaping", layer.shaping).build
        self.shaping: Shaping = shaping(layer, maps.heads(layer))
        epilogue = REGISTRY.find("epilogue", layer.epilogue).build
        self.epilogue: Epilogue = epilogue(layer, maps.heads(layer))
        std = 0.0 if layer.query_range is None and self.shaping.zero_queries else layer.query_range
        if std is not None:
            starting(self.q_proj, partial(fixed_normal, own=std))
        self.causal: bool = REGISTRY.find("direction", layer.direction).build()
        self.window = layer.sliding_window
        self.places = self.normalizer.places
        self.heads, self.groups, self.value_heads = queries, groups, layer.num_value_heads
        self.width_of_head = layer.width // maps.heads(layer)

    def forward(
        self,
        x_BTC: Tensor,
        *,
        tables: PositionTables,
        attend: Attend,
        cache: Any = None,
        past: int = 0,
        visibility: Visibility = Visibility(),  # noqa: B008 (a frozen value)
        matrices: list[Tensor] | None = None,
    ) -> Tensor:
        """[B, T, C] → [B, T, C].

        Args:
            tables: what the position made for these positions.
            attend: what computes the maps.
            cache: a transformers Cache of `past` tokens; S = past + T.
            visibility: of all S keys, whatever the layer's own window.
            matrices: where `attend` puts the layer's matrix, `effective_weights`, which the
                output's gradient then passes through.
        """
        q = self.q_norm(_heads(self.q_proj(x_BTC), self.heads))
        k = self.k_norm(_heads(self.k_proj(x_BTC), self.groups))
        dtype = k.dtype
        if self.wide_factors and dtype == torch.float16:
            q, k = q.float(), k.float()
        if self.decay is not None:
            k = self.decay.with_gates(k, x_BTC)
        own_BTC = self.v_proj(x_BTC)
        # What is not projected has the stream's dtype, under autocast a wider one.
        v_BTC = own_BTC.to(k.dtype)
        if not self.cache_unrotated:
            k = self.scores.keys(k, tables.keys)
        if cache is None:
            v = _heads(v_BTC, self.value_heads)
        else:
            k, v = self._remembered(cache, k, v_BTC, past + k.shape[2])
        lambdas = self.maps.lambdas(x_BTC)
        if dropped := past + q.shape[2] - k.shape[2]:  # early keys, by a sliding cache
            visibility = visibility.of_keys(dropped)
        if visibility.window != self.window:
            visibility = visibility._replace(window=self.window)
        if self.decay is not None:
            k, tables = self.decay.columns(k, q.shape[2], visibility)
        prefix = self._prefix(tables, v, cache, past) if self.places else None
        attend_maps = partial(attend, self, lambdas=lambdas)
        if self.cache_unrotated:
            whole = getattr(self.scores, "attend_unrotated", None)
            lone = q.shape[2] == 1 and isinstance(tables.keys, Rotation)
            if lone and prefix is None and whole is not None and getattr(attend, "fuses", False):
                attend_maps = partial(whole, attend=attend_maps, rotation=tables.keys)
            else:
                k = self.scores.keys(k, _last(tables.keys, k.shape[2]))
        if k.shape[1] != v.shape[1]:
            k = layouts.repeat(k, v.shape[1], self.maps.keys_together)
        o_BHTD = self.maps(
            *(self.scores.queries(q, tables.queries), k, v, lambdas),
            attend=attend_maps,
            sink=self.normalizer.sink(q),
            prefix=prefix,
            visibility=visibility,
            scale=self.layer.head_dim**-0.5,
        )
        o_BTC = o_BHTD.transpose(1, 2).flatten(2).to(dtype)

        def make() -> Tensor:
            # Side by side, the heads are one: their sums need no copy.
            values = v_BTC[:, None] if cache is None else v
            mean, weight = self.attention_at_init(values, q.shape[2], tables.at_init, visibility)
            mass = self.maps.row_sum(self.normalizer.row_sum(weight), lambdas)
            mean = mean.transpose(1, 2).reshape(*own_BTC.shape[:2], -1, self.width_of_head)
            return mean if mass is None else mean * (mass.transpose(1, 2) if mass.ndim else mass)

        running = past == 0 and self._runs(tables, visibility.settled(q.shape[2], k.shape[2]))
        o_BTC = self.shaping(own_BTC, o_BTC, CentringTerm(make, running))
        if matrices is not None and torch.is_grad_enabled():
            product = self._product(matrices[-1], v).to(o_BTC.dtype)
            o_BTC = o_BTC.detach() + (product - product.detach())

        def own() -> Tensor:
            value = _heads(own_BTC, self.value_heads)
            value = layouts.repeat(value, self.layer.num_attention_heads, self.maps.keys_together)
            return value.transpose(1, 2).flatten(2)

        return self.o_proj(self.epilogue(o_BTC, x_BTC, own))

    def effective_weights(
        self, weights_BHRS: Tensor, lambdas: Tensor | None, alone: Callable[[], Tensor], first: int
    ) -> Tensor:
        """The matrix [B, heads, R, S] that multiplies the values, for some of the queries.

        Args:
            weights_BHRS: their maps, in the order in which `attend` has them.
            lambdas: `maps.lambdas`, of these queries where they are by token.
            alone: makes the maps of queries and keys with position alone in them
                (`position_only`).
            first: the key that is the first query's own token.
        """
        weights = self.maps.effective_weights(weights_BHRS, lambdas)
        rows, keys = weights.shape[-2:]
        own = torch.eye(rows, keys + rows, dtype=weights.dtype, device=weights.device)
        own = own.roll(first, 1)[:, :keys]
        return self.shaping.effective_weights(
            weights, own, lambda: self.maps.effective_weights(alone(), lambdas)
        )

    def _product(self, matrix_BHTS: Tensor, v_BGSD: Tensor) -> Tensor:
        """The heads' outputs again, [B, T, width], by the matrix that multiplies the values."""
        heads = matrix_BHTS.shape[1]
        v = layouts.repeat(v_BGSD, self.layer.num_attention_heads, self.maps.keys_together)
        v_BHSD = v.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)
        return self.maps.finish(matrix_BHTS @ v_BHSD).transpose(1, 2).flatten(2)

    def _runs(self, tables: PositionTables, visibility: Visibility) -> bool:
        """True where C·x is the values' running mean: no mask, no sink, no decay, one map."""
        plain = visibility.window is None and not visibility.masked
        whole = self.normalizer.resting() is None and len(self.maps.maps) == 1
        return self.causal and plain and tables.at_init is None and whole

    def _prefix(
        self, tables: PositionTables, v_BGSD: Tensor, cache: Any, past: int
    ) -> tuple[Tensor, Tensor]:
        """The prefix's keys with their positions, one for each value, and its values.

        A cache keeps them from its first tokens on, as it keeps those tokens' own: beside their
        slots, since its length, by which it is cut and tokens are counted, is the text's. Not one
        of fixed room, whose steps a graph may repeat after the cache was filled anew.
        """
        batch, prefix, learning = v_BGSD.shape[0], None, torch.is_grad_enabled()
        if past and not learning:
            prefix = getattr(cache, "prefixes", {}).get(self.layer.index)
        if prefix is None or prefix[0].dtype != v_BGSD.dtype:  # autocast came or went
            own: Any = self.normalizer.prefix()
            table: Any = tables.prefix
            key_GND, value_GND = (x.to(v_BGSD.dtype) for x in own)
            rows = batch if self.cache_unrotated else 1
            key_BGND = self.scores.keys(key_GND.expand(rows, -1, -1, -1), table())
            key_BGND = layouts.repeat(key_BGND, v_BGSD.shape[1], self.maps.keys_together)
            prefix = key_BGND, value_GND[None]
            fixed = self.cache_unrotated or getattr(cache, "is_compileable", True)
            if not (fixed or learning or torch.compiler.is_compiling()):
                vars(cache).setdefault("prefixes", {})[self.layer.index] = prefix
        key_BGND, value_BGNV = prefix
        if batch == 1:
            return prefix
        return key_BGND.expand(batch, -1, -1, -1), value_BGNV.expand(batch, -1, -1, -1)

    def _remembered(self, cache: Any, k: Tensor, v_BTC: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """All keys and values so far, or the last of them, where a window reaches no further.

        A static cache has room for more, which is cut off. It also takes its number of heads from
        the keys: values of heads that share one lie side by side in it.
        """
        v = _heads(v_BTC, self.groups)
        new = k.shape, v.shape
        needed = keys if self.window is None else min(keys, k.shape[2] + self.window - 1)
        try:
            k, v = cache.update(k, v, self.layer.index)
        except (RuntimeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise ClearheadError(
                f"the cache does not fit this model or has no room for {keys} tokens ({reason}): "
                "start a new one"
            ) from error
        for found, given in zip((k.shape, v.shape), new, strict=True):
            if (*found[:2], found[3]) != (*given[:2], given[3]) or found[2] < needed:
                raise ClearheadError(
                    f"the cache holds {list(found)} where this model needs "
                    f"{[*given[:2], keys, given[3]]}: "
                    "it is another model's or another batch's; start a new one"
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


def _heads(x_BTN: Tensor, heads: int) -> Tensor:
    return x_BTN.view(*x_BTN.shape[:-1], heads, -1).transpose(1, 2)
