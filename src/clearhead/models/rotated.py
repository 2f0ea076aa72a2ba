"""Function-preserving changes of a model that make it easier to quantise: rotations, equal rows.

A random orthogonal matrix Q rotates the residual stream, x → x Q: matrices that write to it are
multiplied by Q, those that read it by Qᵀ, once the gains of the norm before them are merged into
them. A matrix R for each layer rotates the values that heads average. Outliers in a few channels
are thereby spread over all of them (QuaRot, arXiv 2404.00456, sections 4.1 and 4.2).

Where a tied head E follows a norm of gains g, E Q writes and E diag(g) Q reads, and one table can
be both only if all gains are equal. So the table stays E, with the matrix Q behind the embedding
and diag(g) Q before the head (`embedding_projection`).

A learned rotation keeps the largest entries of long rows small, which set the one scale of all, by
a Cayley transform as in SpinQuant (arXiv 2405.16406), but without a text.

Equal rows are for gated MLPs: a row of the up projection is divided by a number that multiplies the
down projection's column. In arXiv 1906.04721 (section 4.1) each matrix takes half of the scale;
here the down projection takes all of it, since its rotation mixes its columns afterwards.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.family import filled, merged
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.starts import started
from clearhead.nn.positions import NoPosition
from clearhead.nn.positionwise import RMSNorm
from clearhead.nn.registry import REGISTRY
from clearhead.ops.hadamard import rotate_channels

Part = Literal["residual", "values"]
# A learned rotation shrinks entries beyond LIMIT times their matrix's root mean square (of normal
# numbers one in 150,000), in its at most ROWS rows that are longer than LONG times that.
LIMIT, LONG, ROWS = 4.5, 1.2, 128
STEPS, RATE = 60, 0.05  # the rate over √width
# A row smaller than this share of the median is enlarged as if it had it, lest its bias explode.
SMALLEST = 1e-3
# Values of the axes that a part's rotation passes.
_NEEDS: dict[Part, dict[str, tuple[str, ...]]] = {
    "residual": {
        "norm": ("rmsnorm", "rmsnorm-single"),
        "values": ("linear",),
        "projections": ("linear",),
    },
    "values": {
        "values": ("linear",),
        "projections": ("linear",),
        "maps": ("single", "differential-v2"),
        "epilogue": ("none", "xsa"),
    },
}


def rotated(
    model: ClearheadForCausalLM, parts: Sequence[Part], *, seed: int = 0, learn: bool = False
) -> ClearheadForCausalLM:
    """The same function in another basis, from copies of the weights in their dtype.

    Args:
        parts: "residual" rotates the residual stream, with `embedding_projection` where a tied head
            follows a norm with a gain for each channel; "values" rotates each layer's values.
        learn: rotate the residual stream once more, by a rotation learned from the weights.
    """
    check_rotation(model.config, parts)
    untied = not model.config.tie_word_embeddings
    if "residual" in parts and not untied and model.model.norm.weight.numel() > 1:
        result = started(model, {"embedding_projection": True}).model
    else:  # `merged` copies where there is something to merge
        result = merged(model) if "residual" in parts and untied else model
        if result is model:
            result = filled(ClearheadForCausalLM, deepcopy(model.config), model.state_dict(), model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        size = result.config.hidden_size if "residual" in parts else 0
        turn = _orthogonal(size, draw).to(result.device)
        if "values" in parts:
            for layer in result.model.layers:
                _turn_values(layer.self_attn, draw)
        if learn:  # from the rows as the other rotations leave them
            readers = chain.from_iterable(map(_readers, result.model.layers))
            gained = (linear.weight * norm.weight / _scale(norm) for linear, norm in readers)
            turn = turn @ learned_rotation(gained, turn)
        if size:
            _turn_residual(result, turn)
    return result


def check_rotation(config: ClearheadConfig, parts: Sequence[Part]) -> None:
    """Refuse a mechanism that works channel by channel, naming its axis."""
    layers = config.layers()
    values = [
        (axis, getattr(layer, axis), allowed)
        for part in parts
        for axis, allowed in _NEEDS[part].items()
        for layer in layers
    ]
    if "residual" in parts:
        values.append(("embedding_norm", config.embedding_norm, ("none", "rmsnorm-single")))
    if "values" in parts and any(layer.normalizer == "key-value" for layer in layers):
        values.append(("normalizer", "key-value", ("softmax",)))
    for axis, name, allowed in values:
        if name not in allowed:
            raise ClearheadError(
                f"{axis}={name!r} treats each channel by itself: --rotate takes "
                f"{axis} {' or '.join(allowed)}"
            )
    embeds: Any = REGISTRY.find("position", config.position).build
    if "residual" in parts and embeds.embed is not NoPosition.embed:
        raise ClearheadError(
            f"position={config.position!r} is added to the stream: leave residual out of --rotate"
        )


def _orthogonal(size: int, draw: torch.Generator) -> Tensor:
    """A uniformly random rotation, float64 [size, size]."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
    return q * r.diagonal().sign()


def _turn_residual(model: ClearheadForCausalLM, turn: Tensor) -> None:
    trunk: Any = model.model
    readers = list(chain.from_iterable(map(_readers, trunk.layers)))
    writers = [
        one for layer in trunk.layers for one in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    if model.config.embedding_projection:
        readers.append((trunk.project_out, trunk.norm))
        writers.append(trunk.project_in)
    else:
        if not model.config.tie_word_embeddings:
            readers.append((model.lm_head, trunk.norm))
        trunk.embed_tokens.weight.copy_(trunk.embed_tokens.weight.double() @ turn)
    for linear, norm in readers:
        gain = norm.weight.double() / _scale(norm)
        linear.weight.copy_((linear.weight.double() * gain) @ turn)
    for norm in {norm for _, norm in readers}:  # whose gains' differences the matrices now have
        norm.weight.fill_(_scale(norm))
    for weight in chain.from_iterable(writer.parameters() for writer in writers):
        weight.copy_(turn.mT @ weight.double())


def _readers(layer: Any) -> Iterator[tuple[nn.Linear, Any]]:
    """The layer's matrices that read the stream, each with the norm before it."""
    second = getattr(layer, "post_attention_layernorm", layer.input_layernorm)
    for branch, norm in ((layer.self_attn, layer.input_layernorm), (layer.mlp, second)):
        for name, module in branch.named_modules():
            if isinstance(module, nn.Linear) and name not in ("o_proj", "down_proj"):
                yield module, norm


def _scale(norm: RMSNorm) -> float:
    """The size of a norm's gains, which stays in the norm."""
    return float(norm.weight.double().square().mean().sqrt()) or 1.0


def _turn_values(attention: Any, draw: torch.Generator) -> None:
    value, out, width = attention.v_proj, attention.o_proj, attention.layer.head_dim
    turn = _orthogonal(width, draw).to(value.weight.device)
    for weight in (value.weight, value.bias):
        if weight is not None:
            heads = weight.double().view(-1, width, weight[0].numel())
            weight.copy_((turn.mT @ heads).view_as(weight))
    heads = out.weight.double().unflatten(1, (-1, width))
    out.weight.copy_((heads @ turn).flatten(1))


def learned_rotation(matrices: Iterator[Tensor], turn: Tensor) -> Tensor:
    """An orthogonal matrix, float64 [D, D], that makes the largest entries of each
    `matrix @ turn @ rotation` small; `turn` is orthogonal, and the matrices [*, D] read the stream.
    """
    rows_ND = torch.cat([_long_rows(weight.float()) for weight in matrices]) @ turn.float()
    count, width = rows_ND.shape
    if not count:  # nothing to make smaller
        return torch.eye(width, dtype=torch.float64, device=rows_ND.device)
    half_DD = torch.zeros(width, width, device=rows_ND.device, requires_grad=True)
    adam = torch.optim.Adam([half_DD], lr=RATE / width**0.5)
    with torch.enable_grad():
        for _ in range(STEPS):
            beyond_ND = ((rows_ND @ _cayley(half_DD)).abs() - LIMIT).clamp(min=0)
            adam.zero_grad()
            beyond_ND.square().sum().backward()
            adam.step()
    return _cayley(half_DD.detach().double())


def _long_rows(weight_OD: Tensor) -> Tensor:
    """The longest rows of a matrix, in units of its root mean square."""
    size = weight_OD.square().mean().sqrt()
    rows_OD = weight_OD / torch.where(size > 0, size, 1.0)
    longest = rows_OD.square().mean(1).sqrt().sort(descending=True)
    return rows_OD[longest.indices[:ROWS][longest.values[:ROWS] > LONG]]


def _cayley(half_DD: Tensor) -> Tensor:
    """The rotation (I + S)⁻¹ (I − S) of the skew-symmetric S = H − Hᵀ."""
    skew_DD = half_DD - half_DD.mT
    eye_DD = torch.eye(len(half_DD), dtype=half_DD.dtype, device=half_DD.device)
    return torch.linalg.solve(eye_DD + skew_DD, eye_DD - skew_DD)


def equalised(model: ClearheadForCausalLM) -> ClearheadForCausalLM:
    """The same function with rows of equal largest |weight| in every up projection; other weights
    are shared with the model."""
    check_equalised(model)
    result = filled(ClearheadForCausalLM, model.config, model.state_dict(), model, share=True)
    with torch.no_grad():
        for layer in result.model.layers:
            up, down = layer.mlp.up_proj, layer.mlp.down_proj.weight
            sizes_O = up.weight.double().abs().amax(1)
            if not (nonzero := sizes_O[sizes_O > 0]).numel():
                continue  # a projection of zeros has nothing to scale
            scale_O = (sizes_O / nonzero.median()).clamp(min=SMALLEST)
            scale_O = torch.where(sizes_O > 0, scale_O, 1.0)
            # New tensors: the model keeps its own.
            up.weight.data = (up.weight.double() / scale_O[:, None]).to(result.dtype)
            if up.bias is not None:
                up.bias.data = (up.bias.double() / scale_O).to(result.dtype)
            # The rotation before the down projection is part of its weights.
            down.data = rotate_channels(rotate_channels(down.double()) * scale_O).to(result.dtype)
    return result


def check_equalised(model: ClearheadForCausalLM) -> None:
    """Refuse a model whose rows cannot be made equal; it may be on the meta device."""
    for index, layer in enumerate(model.model.layers):
        mlp: Any = layer.mlp
        spec = model.config.layer(index)
        if not mlp.gated:
            raise ClearheadError(
                f"mlp={spec.mlp!r} has a function between its matrices: choose swiglu or geglu"
            )
        if spec.mlp_rotation != "hadamard":
            raise ClearheadError("--equalise gives rows' sizes to columns: give --rotate down too")
