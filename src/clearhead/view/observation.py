"""Attention, hidden states and predictions of one model on one text, and the page of them.

A packed weight is w ≈ peak · sign(n) · (n / steps)², n its level less `centre`. The bytes of a map
are its columns one below the other, then a null key's weights; under causal attention without the
zeros above the diagonal.
"""

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.diagnose.attention_profile import RowMeans
from clearhead.errors import ClearheadError
from clearhead.models import inspection
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import Statistic, observe
from clearhead.probe.tiles import AttentionTile, ByTile
from clearhead.report.page import Page, Section
from clearhead.report.page import render as render_page

LONGEST = 256  # tokens, of which the maps of 270 heads take 3 MB
SCRIPTS = ("unpack.js", "colours.js", "heads.js", "maps.js", "text.js", "layers.js", "page.js")
KEYS = (
    "Keys: H heads, T text, M map, C colours; arrows move within each. Attention weights are drawn "
    "in 24 levels (31 where they have signs) on a √ scale."
)
_LESS_MEMORY = "give a shorter --text or a smaller --tokens; nothing was written"
STEPS = 23  # 24 levels of weights that are never negative
SIGNED_STEPS = 15  # 31 levels
SHOWN = {"first_token_argmax_share": "first_token_share"}
SHOWN |= {name: name for name in ("null_mass", "prefix_mass", "entropy", "negative_share")}
BEST = 4  # predictions shown of each token and layer
_CLOSE = 0.02  # of a probability: a lens further off is not this model's


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A model on a text, packed.

    Attributes:
        model: tokens, statistics of heads and predictions; "maps" has each head's chunks.
        chunks: packed maps, which the page unpacks when they are shown.
        lost: where numbers are not finite: "after layer 3", "in the logits"; "" if all are.
    """

    model: dict[str, Any]
    chunks: list[str]
    lost: str = ""


class AttentionTrace(RowMeans):
    """Statistics of every head, as in a diagnosis, and the whole maps.

    `negative_share` is the part of a signed map's Σ|weight| that is negative.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.causal = length, True
        self.maps: dict[tuple[int, int, str], Tensor] = {}  # (layer, head, map): finite, [T, T]
        self.nulls: dict[tuple[int, int, str], Tensor] = {}  # a null key's weights, [T]
        self.lambdas: dict[int, Tensor] = {}  # a scalar or [heads, T]
        self.names: dict[int, tuple[str, ...]] = {}  # of a layer's maps

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        super().observe(call, tile)
        start, layer = call.before + tile.start, call.layer
        rows = slice(start, start + tile.visible.shape[2])
        self.causal &= not bool(tile.visible[0].triu(start + 1).any())
        self.names[layer] = tuple(part.name for part in tile.maps)
        for part in tile.maps:
            if part.entropy is None:
                both = part.weights[0].clamp(max=0.0).neg(), part.weights[0].abs()
                below, whole = (one.sum((-1, -2)) for one in both)
                self.add(layer, below, whole, metric="negative_share", map=part.name)
            for head, weights_TS in enumerate(part.weights[0]):
                place = layer, head, part.name
                map_TT = self.maps.setdefault(place, torch.zeros(self.length, self.length))
                map_TT[rows, : weights_TS.shape[-1]] = weights_TS.nan_to_num(0.0, 0.0, 0.0).cpu()
                if part.null is not None:
                    null_T = self.nulls.setdefault(place, torch.zeros(self.length))
                    null_T[rows] = part.null[0, head].nan_to_num(0.0, 0.0, 0.0).cpu()
        if tile.lambdas is not None:
            own = tile.lambdas.detach().float().cpu()
            self.lambdas[layer] = own[0, :, :, 0] if own.ndim > 2 else own.flatten()[0]

    def statistics(self) -> dict[str, dict[str, list[list[float]]]]:
        """Metric → map → [layer][head]; 0 where no query counts."""
        panels: dict[str, dict[str, list[list[float]]]] = {}
        for line in self.measures():
            if "head" in line and line["metric"] in SHOWN:
                rows = panels.setdefault(SHOWN[line["metric"]], {}).setdefault(line["map"], [])
                rows += [[] for _ in range(line["layer"] + 1 - len(rows))]
                value = line["value"]
                rows[line["layer"]].append(round(value, 5) if value == value else 0.0)
        return panels


class HiddenTrace(Statistic):
    """Hidden states before the first layer and after each, token by token: [T] by layer."""

    def __init__(self) -> None:
        self.norms: dict[int, Tensor] = {}  # ‖x‖
        self.largest: dict[int, Tensor] = {}  # the largest |x| ÷ the median |x| of the layer
        self.channels: dict[int, Tensor] = {}  # where the largest |x| is

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        x = x_BTC[0].float()
        magnitude = x.abs()
        peak, channel = magnitude.max(-1)
        self.norms[layer] = torch.linalg.vector_norm(x, dim=-1).cpu()
        self.largest[layer] = (peak / magnitude.median().clamp_min(1e-30)).cpu()
        self.channels[layer] = channel.cpu()


class Lens(Statistic):
    """The logit lens: a causal language model's prediction of the next token after each layer.

    The model's own final norm and output head are applied to the hidden states of every layer
    (nostalgebraist, 2020). The norm is the module of the backbone whose input is the last layer's
    output. A model may do more to its logits: see `agrees`.
    """

    def __init__(self, model: Any, ids_BT: Tensor) -> None:
        self.head = model.get_output_embeddings()
        self.tokens: dict[int, Tensor] = {}  # by layer: the likeliest next tokens, [T, BEST]
        self.shares: dict[int, Tensor] = {}  # their probabilities
        last = inspection.decoder_layers(model)[-1]
        output: list[Tensor] = []
        norms: list[Any] = []

        def watch(module: nn.Module, arguments: Any, result: Any) -> None:
            if module is last:
                output.append(result[0] if isinstance(result, tuple) else result)
            # A pooler has the same input, but returns one vector.
            elif output and arguments and arguments[0] is output[-1] and isinstance(result, Tensor):
                norms.extend([module] * (result.shape == output[-1].shape))

        others = {*model.base_model.modules()} - {*last.modules()}
        handles = [module.register_forward_hook(watch) for module in (last, *others)]
        try:
            model(input_ids=ids_BT)
        finally:
            for handle in handles:
                handle.remove()
        self.norm = norms[0] if norms else nn.Identity()

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        # A stream in float32 has a head of the weights' dtype (Mamba in bfloat16).
        weight = getattr(self.head, "weight", None)
        normed = self.norm(x_BTC[0])
        logits_TV = self.head(normed if weight is None else normed.to(weight.dtype))
        self.shares[layer], self.tokens[layer] = _best(logits_TV)

    def agrees(self, logits_TV: Tensor) -> bool:
        """The prediction after the last layer is the model's own."""
        shares, _ = _best(logits_TV)
        return bool(((shares - self.shares[max(self.shares)]).abs() < _CLOSE).all())


def observe_text(
    model: Any, tokenizer: Any, text: str, *, name: str, longest: int = LONGEST
) -> Observation:
    """Run a model on a text and pack its statistics, maps and predictions.

    Args:
        model: a causal language model or an encoder of transformers.
        tokenizer: its own, a fast one.
        name: the model's name as the page shows it.
        longest: maximum number of tokens read; the page says if the text was cut.

    Raises:
        ClearheadError: fewer than 2 tokens, more than there are learned positions, a model whose
            attention cannot be observed, or too little memory.
    """
    tokens = _tokens(tokenizer, text)
    total, tokens = len(tokens), tokens[:longest]
    if reason := inspection.lack_of_positions(model, len(tokens), name):
        raise ClearheadError(f"{reason}: give --tokens {inspection.longest_text(model)}")
    if len(tokens) < 2:
        raise ClearheadError(f"the text is {len(tokens)} token for {name}: give at least 2")
    ids_T = torch.tensor([token for token, *_ in tokens])
    with inspection.within_memory(_LESS_MEMORY), inspection.evaluating(model):
        (ids_BT,) = inspection.batches(model, [ids_T], 1)
        data, trace = _observed(model, tokenizer, ids_BT, name)
    data["tokens"] = [shown for _, shown, *_ in tokens]
    data["spans"] = [list(span) for *_, span in tokens]
    data["total"] = total
    chunks: list[str] = []
    for (layer, head, map), weights in trace.maps.items():
        null_T = trace.nulls.get((layer, head, map))
        packed = pack_map(weights, null_T, causal=trace.causal)
        chunks.append(packed.pop("data"))
        place = {**packed, "chunk": len(chunks) - 1, "null": null_T is not None}
        data["maps"].setdefault(f"{layer}.{head}", {})[map] = place
    return Observation(model=data, chunks=chunks, lost=data["lost"])


def _observed(
    model: Any, tokenizer: Any, ids_BT: Tensor, name: str
) -> tuple[dict[str, Any], AttentionTrace]:
    trace, hidden = AttentionTrace(ids_BT.shape[1]), HiddenTrace()
    lens = None
    if model.get_output_embeddings() is not None and getattr(model.config, "vocab_size", 0) >= BEST:
        lens = Lens(model, ids_BT[:, :2])
    states: list[Statistic] = [hidden] if lens is None else [hidden, lens]
    with observe(model, attention=[ByTile(weights=[trace])], hidden=states):
        out = inspection.run_backbone(model, ids_BT) if lens is None else model(input_ids=ids_BT)
    if not trace.names:
        raise ClearheadError(f"{name} has no attention in its layers that could be observed")
    data: dict[str, Any] = {
        "name": name,
        "causal": trace.causal,
        "names": [list(trace.names.get(layer, ())) for layer in range(max(trace.names) + 1)],
        "statistics": trace.statistics(),
        "lambdas": {n: _rounded(x, 3 if x.ndim else 4) for n, x in trace.lambdas.items()},
        "hidden": {"rows": len(hidden.channels)},
        "maps": {},
    }
    for part, kind in (("norms", "<f4"), ("largest", "<f4"), ("channels", "<u4")):
        table = [values for _, values in sorted(getattr(hidden, part).items())]
        data["hidden"][part] = pack(np.asarray(torch.stack(table).nan_to_num(0, 0, 0), dtype=kind))
    if lens is not None and trace.causal:
        logits_TV = out.logits[0]
        data["surprise"] = [None, *_rounded(surprises(logits_TV, ids_BT[0]))]
        if lens.agrees(logits_TV):
            data["lens"] = _lens(lens, tokenizer)
    lost = [layer for layer, norms in sorted(hidden.norms.items()) if not norms.isfinite().all()]
    data["lost"] = "in the logits" if None in data.get("surprise", ())[1:] else ""
    if lost:
        data["lost"] = f"after layer {lost[0]}" if lost[0] >= 0 else "before the first layer"
    return data, trace


def _tokens(tokenizer: Any, text: str) -> list[tuple[int, str, tuple[int, int]]]:
    """(id, characters, their place in the text) of each token, a beginning one where there is."""
    if not getattr(tokenizer, "is_fast", False):
        raise ClearheadError(f"{type(tokenizer).__name__} is no fast tokenizer (tokenizer.json)")
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids, spans = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids, spans = [begin, *ids], [(0, 0), *spans]
    out: list[tuple[int, str, tuple[int, int]]] = []
    end = 0
    for token, (start, stop) in zip(ids, spans, strict=True):
        if stop > start:  # Characters of several tokens are shown with the first of them.
            shown = text[max(end, min(start, end)) : stop] if stop > end else ""
            end = max(end, stop)
        else:
            shown = str(tokenizer.convert_ids_to_tokens(token))
        out.append((token, shown, (int(start), int(stop))))
    return out


def _lens(lens: Lens, tokenizer: Any) -> dict[str, Any]:
    """Predictions of every layer, as places in a list of the strings that occur."""
    layers = sorted(lens.tokens)
    ids = torch.stack([lens.tokens[layer] for layer in layers])
    shares = torch.stack([lens.shares[layer] for layer in layers])
    tokens, places = np.unique(ids.numpy(), return_inverse=True)
    options = {"clean_up_tokenization_spaces": False}
    words = [tokenizer.decode([token], **options) for token in tokens.tolist()]
    strings = list(dict.fromkeys(words))
    places = np.array([strings.index(word) for word in words])[places].reshape(ids.shape)
    return {
        "best": BEST,
        "strings": strings,
        "tokens": pack(places.astype(np.uint32)),
        "shares": pack((shares.clamp(0, 1).sqrt() * 255).round().numpy().astype(np.uint8)),
    }


def _rounded(values: Any, digits: int = 3) -> Any:
    """Numbers for JSON; None where one is not finite."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, list):
        return [_rounded(one, digits) for one in values]
    return round(values, digits) if math.isfinite(values) else None


def _best(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The BEST largest probabilities of each row, and their tokens."""
    logits = logits_TV.float()
    top = logits.topk(BEST)
    return torch.exp(top.values - logits.logsumexp(-1, keepdim=True)).cpu(), top.indices.cpu()


def surprises(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """−log₂ p of each token after those before it, [T − 1]."""
    nats = nn.functional.cross_entropy(logits_TV[:-1].float(), ids_T[1:], reduction="none")
    return nats.cpu() / torch.tensor(math.log(2.0))


def pack(values: np.ndarray) -> str:
    """Little-endian bytes, compressed by zlib, in base64."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def pack_map(weights_TT: Tensor, null_T: Tensor | None, *, causal: bool) -> dict[str, Any]:
    """One map's {"peak", "steps", "centre", "data"}, of finite float32 weights."""
    signed = bool((weights_TT < 0).any())
    steps, centre = (SIGNED_STEPS, SIGNED_STEPS) if signed else (STEPS, 0)
    columns = weights_TT.T
    part = columns[tuple(torch.triu_indices(*columns.shape))] if causal else columns.flatten()
    weights = torch.cat([part, *([] if null_T is None else [null_T])])
    peak = float(f"{float(weights.abs().max()):.6g}") or 1.0
    levels = (weights.abs() / peak).clamp(max=1.0).sqrt() * weights.sign() * steps
    data = pack((levels.round() + centre).cpu().numpy().astype(np.uint8))
    return {"peak": peak, "steps": steps, "centre": centre, "data": data}


def render(observations: Sequence[Observation], *, title: str) -> str:
    """The page of one model, or of two side by side, as HTML text: the pages' template with the
    viewer's own scripts."""
    files = resources.files("clearhead.view")
    page = Page(
        title=title,
        kicker="clearhead view",
        sections=[Section("viewer", "", (), KEYS)],
        script="".join(files.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS),
        data={"models": [one.model for one in observations]},
        late=[one.chunks for one in observations],
    )
    return render_page(page)
