"""Attention, hidden states and predictions of one model on one text, and the page of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.models import inspection
from clearhead.probe.observation import Statistic, observe
from clearhead.probe.tiles import ByTile
from clearhead.report.page import Page, Section
from clearhead.report.page import render as render_page
from clearhead.view.trace import BEST, AttentionTrace, HiddenTrace, Lens, pack, pack_map, surprises

LONGEST = 256  # tokens, of which the maps of 270 heads take 3 MB
SCRIPTS = ("unpack.js", "colours.js", "heads.js", "maps.js", "text.js", "layers.js", "page.js")
KEYS = (
    "Keys: H heads, T text, M map, C colours; arrows move within each. Attention weights are drawn "
    "in 24 levels (31 where they have signs) on a √ scale."
)
_LESS_MEMORY = "give a shorter --text or a smaller --tokens; nothing was written"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A model on a text, packed.

    Attributes:
        model: tokens, statistics of heads and predictions, shown when the page opens.
        chunks: packed maps, which the page unpacks when they are shown; `model["maps"]` has the
            location of each head's maps.
        lost: where numbers are not finite: "after layer 3", "in the logits"; "" if all are.
    """

    model: dict[str, Any]
    chunks: list[str]
    lost: str = ""


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
        ClearheadError: a text of fewer than 2 tokens, more tokens than the model has learned
            positions, a model whose attention cannot be observed, or too little memory.
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
        return _observed(model, tokenizer, ids_BT, tokens, total, name)


def _observed(
    model: Any, tokenizer: Any, ids_BT: Tensor, tokens: list[Any], total: int, name: str
) -> Observation:
    trace, hidden = AttentionTrace(ids_BT.shape[1]), HiddenTrace()
    predicts = (
        model.get_output_embeddings() is not None and getattr(model.config, "vocab_size", 0) >= BEST
    )
    lens = Lens(model, ids_BT[:, :2]) if predicts else None
    states: list[Statistic] = [hidden] if lens is None else [hidden, lens]
    with observe(model, attention=[ByTile(weights=[trace])], hidden=states):
        out = inspection.run_backbone(model, ids_BT) if lens is None else model(input_ids=ids_BT)
    if not trace.names:
        raise ClearheadError(f"{name} has no attention in its layers that could be observed")
    data: dict[str, Any] = {
        "name": name,
        "tokens": [shown for _, shown, *_ in tokens],
        "spans": [list(span) for *_, span in tokens],
        "total": total,
        "causal": trace.causal,
        "names": [list(trace.names.get(layer, ())) for layer in range(max(trace.names) + 1)],
        "statistics": trace.statistics(),
        "lambdas": {n: _rounded(x, 3 if x.ndim else 4) for n, x in trace.lambdas.items()},
        "hidden": {"rows": len(hidden.channels)},
    }
    for part, kind in (("norms", "<f4"), ("largest", "<f4"), ("channels", "<u4")):
        table = [values for _, values in sorted(getattr(hidden, part).items())]
        data["hidden"][part] = pack(np.asarray(torch.stack(table).nan_to_num(0, 0, 0), dtype=kind))
    if lens is not None and trace.causal:
        logits_TV = out.logits[0]
        data["surprise"] = [None, *_rounded(surprises(logits_TV, ids_BT[0]))]
        if lens.agrees(logits_TV):
            data["lens"] = _lens(lens, tokenizer)
    data["lost"] = hidden.lost()
    if not data["lost"] and None in data.get("surprise", ())[1:]:
        data["lost"] = "in the logits"
    chunks: list[str] = []
    data["maps"] = {}
    for (layer, head, map), weights in trace.maps.items():
        null_T = trace.nulls.get((layer, head, map))
        packed = pack_map(weights, null_T, causal=trace.causal)
        chunks.append(packed.pop("data"))
        place = {**packed, "chunk": len(chunks) - 1, "null": null_T is not None}
        data["maps"].setdefault(f"{layer}.{head}", {})[map] = place
    return Observation(model=data, chunks=chunks, lost=data["lost"])


def _tokens(tokenizer: Any, text: str) -> list[tuple[int, str, tuple[int, int]]]:
    """(id, characters, their place in the text) of each token, a beginning one where there is."""
    if not getattr(tokenizer, "is_fast", False):
        raise ClearheadError(
            f"{type(tokenizer).__name__} does not say which characters a token has: "
            "give a model with a fast tokenizer (tokenizer.json)"
        )
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
    strings: dict[str, int] = {}
    known: dict[int, int] = {}
    for token in ids.unique().tolist():
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        known[token] = strings.setdefault(text, len(strings))
    places = np.vectorize(known.__getitem__)(ids.numpy())
    return {
        "best": BEST,
        "strings": list(strings),
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
