"""Blocks: one layer's attention and MLP around the residual stream, a class for each equation.

In the equations A is attention, M the MLP and N a norm. β_SA and β_FF are the gains of the two
branches and α_FF that of the MLP's skip, each 1 where the configuration gives none. Dropout applies
to a branch where something is added to it. docs/mechanisms.md draws them.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clearhead.nn.attention import Attention
from clearhead.nn.bases import PAPER
from clearhead.nn.registry import REGISTRY
from clearhead.spec import Declaration, LayerSpec


class Gain(nn.Module):
    """x · β, β a trained number (arXiv 2311.01906, section 4.1)."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.gain = nn.Parameter(torch.full((1,), float(start)))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.gain


class Block(nn.Module):
    """The parts of a layer, which subclasses put together, each in its `forward`.

    `inputs` are the arguments of `Attention.forward`. There are 1 or 2 `norms`; `added` is True for
    attention's branch, and for the MLP's, where it is added to another path.
    """

    norms: ClassVar[int] = 2  # 1 or 2
    # Whether attention's branch, and the MLP's, are added to another path.
    added: ClassVar[tuple[bool, bool]] = (True, True)

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        norm = REGISTRY.find("norm", layer.norm).build
        self.input_layernorm = norm(layer.hidden_size, layer.norm_eps)
        self.self_attn = Attention(layer)
        gains = (layer.attention_gain, layer.mlp_gain, layer.mlp_skip_gain)
        attention_gain, mlp_gain, mlp_skip_gain = (None if g is None else Gain(g) for g in gains)
        self.attention_gain = attention_gain
        if self.norms == 2:
            self.post_attention_layernorm = norm(layer.hidden_size, layer.norm_eps)
        rotation = REGISTRY.find("mlp_rotation", layer.mlp_rotation).build
        mlp = REGISTRY.find("mlp", layer.mlp).build
        self.mlp = mlp(layer, rotation(layer.intermediate_size))
        self.mlp_gain, self.mlp_skip_gain = mlp_gain, mlp_skip_gain
        self.attention_dropout, self.mlp_dropout = [
            nn.Dropout(layer.dropout) if layer.dropout and added else None for added in self.added
        ]

    def attention(self, z_BTC: Tensor, **inputs: Any) -> Tensor:
        """β_SA A(z)."""
        branch_BTC = self.self_attn(z_BTC, **inputs)
        if self.attention_gain is not None:
            branch_BTC = self.attention_gain(branch_BTC)
        return branch_BTC if self.attention_dropout is None else self.attention_dropout(branch_BTC)

    def feed_forward(self, z_BTC: Tensor) -> Tensor:
        """β_FF M(z)."""
        branch_BTC = self.mlp(z_BTC)
        if self.mlp_gain is not None:
            branch_BTC = self.mlp_gain(branch_BTC)
        return branch_BTC if self.mlp_dropout is None else self.mlp_dropout(branch_BTC)

    def skip(self, x_BTC: Tensor) -> Tensor:
        """α_FF x."""
        return x_BTC if self.mlp_skip_gain is None else self.mlp_skip_gain(x_BTC)


class PreNorm(Block):
    """Pre-LN: y = x + β_SA A(N x), then α_FF y + β_FF M(N y) (arXiv 2311.01906, eq. 1)."""

    def forward(self, x_BTC: Tensor, **inputs: Any) -> Tensor:
        x_BTC = x_BTC + self.attention(self.input_layernorm(x_BTC), **inputs)
        changed_BTC = self.feed_forward(self.post_attention_layernorm(x_BTC))
        return self.skip(x_BTC) + changed_BTC


class SAS(Block):
    """Attention alone carries the signal: y = β_SA A(N x), then α_FF y + β_FF M(N y).

    SAS has shaped attention, values and projections the identity (arXiv 2311.01906, section 4.2);
    V-SkipInit has matrices for these (arXiv 2302.10322).
    """

    added = (False, True)

    def forward(self, x_BTC: Tensor, **inputs: Any) -> Tensor:
        x_BTC = self.attention(self.input_layernorm(x_BTC), **inputs)
        changed_BTC = self.feed_forward(self.post_attention_layernorm(x_BTC))
        return self.skip(x_BTC) + changed_BTC


class Skipless(Block):
    """Neither skip: y = β_SA A(N x), then β_FF M(N y) (arXiv 2302.10322)."""

    added = (False, False)

    def forward(self, x_BTC: Tensor, **inputs: Any) -> Tensor:
        x_BTC = self.attention(self.input_layernorm(x_BTC), **inputs)
        return self.feed_forward(self.post_attention_layernorm(x_BTC))


class AttentionSkip(Block):
    """Attention's skip alone: y = x + β_SA A(N x), then β_FF M(N y)."""

    added = (True, False)

    def forward(self, x_BTC: Tensor, **inputs: Any) -> Tensor:
        x_BTC = x_BTC + self.attention(self.input_layernorm(x_BTC), **inputs)
        return self.feed_forward(self.post_attention_layernorm(x_BTC))


class Parallel(Block):
    """The parallel block: x + β_SA A(z) + β_FF M(z), z = N x (GPT-J; arXiv 2204.02311)."""

    norms = 1

    def forward(self, x_BTC: Tensor, **inputs: Any) -> Tensor:
        z_BTC = self.input_layernorm(x_BTC)
        return x_BTC + self.attention(z_BTC, **inputs) + self.feed_forward(z_BTC)


class SASP(Block):
    """SAS-P: β_SA A(z) + β_FF M(z), z = N x, without a skip (arXiv 2311.01906, eq. 7)."""

    norms, added = 1, (False, True)

    def forward(self, x_BTC: Tensor, **inputs: Any) -> Tensor:
        z_BTC = self.input_layernorm(x_BTC)
        return self.attention(z_BTC, **inputs) + self.feed_forward(z_BTC)


def block_of(layer: LayerSpec) -> type[Block]:
    """The class of a layer's block, by its order and its skips."""
    kind: type[Block] = REGISTRY.find("order", layer.order).build(layer)
    return kind


# By (attention_skip, mlp_skip).
SEQUENTIAL = {
    ("identity", "identity"): PreNorm,
    ("identity", "none"): AttentionSkip,
    ("none", "identity"): SAS,
    ("none", "none"): Skipless,
}


def _silent(layer: LayerSpec) -> str | None:
    alone = "would write nothing at the start, and no skip passes by it: make that gain null"
    if layer.attention_skip == "none" and layer.attention_gain == 0:
        return f"attention with attention_gain={layer.attention_gain} {alone}"
    skipped = layer.mlp_skip == "identity" and layer.mlp_skip_gain != 0
    if layer.order == "sequential" and not skipped and layer.mlp_gain == 0:
        return f"the MLP with mlp_gain={layer.mlp_gain} {alone}"
    return None


def _mlp_refuses(layer: LayerSpec) -> str | None:
    if layer.mlp_skip_gain is not None and layer.mlp_skip == "none":
        return "mlp_skip_gain has no skip to scale: leave it out, or choose mlp_skip='identity'"
    return None


def _parallel_refuses(layer: LayerSpec) -> str | None:
    if layer.attention_skip != layer.mlp_skip:
        return "one skip is around both: give attention_skip and mlp_skip the same value"
    if layer.mlp_skip_gain is not None:
        return "the MLP has no skip of its own: leave mlp_skip_gain out, or use order='sequential'"
    return _silent(layer)


_order, _attention_skip, _mlp_skip = (
    partial(Declaration, axis) for axis in ("order", "attention_skip", "mlp_skip")
)
DECLARATIONS = (
    _order(
        "sequential",
        "the MLP reads the stream after attention wrote to it; two norms",
        PAPER,
        lambda layer: SEQUENTIAL[layer.attention_skip, layer.mlp_skip],
        refuses=_silent,
    ),
    _order(
        "parallel",
        "the MLP reads what attention reads; one norm",
        "GPT-J; arXiv 2311.01906, eq. 7",
        lambda layer: Parallel if layer.attention_skip == "identity" else SASP,
        refuses=_parallel_refuses,
    ),
    _attention_skip("identity", "x + attention", PAPER, lambda: True),
    _attention_skip(
        "none",
        "attention alone, which must then carry the signal itself (see `shaping`)",
        "arXiv 2302.10322",
        lambda: False,
    ),
    _mlp_skip("identity", "x + MLP", PAPER, lambda: True),
    _mlp_skip(
        "none",
        "the MLP alone",
        "arXiv 2311.01906, section 4.3",
        lambda: False,
        refuses=_mlp_refuses,
    ),
)
