"""What quantisation costs, as tables: for a terminal and for a page."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clearhead.report import style, tables
from clearhead.report.quantization import CLOSE, Quantized, Result, families, schemes

if TYPE_CHECKING:
    from rich.console import Group

# Family -> (heading of its kind, what shares a scale).
KINDS = {
    "wa": "weights and activations, absmax",
    "w": "weights, zero-point",
    "logits": "attention logits, absmax",
}
SCALES = {
    "wa-coarse": "a scale a tensor, both",
    "wa-moderate": "a scale a channel of weights, a tensor of activations",
    "wa-fine": "a scale a channel, both; activations calibrated",
    "wa-token": "a scale a channel of weights, a token of activations",
    "w-tensor": "a scale a tensor",
    "w-channel": "a scale a channel",
    "w-group": "a scale 128 inputs of a channel",
    "logits-tensor": "a scale a text and layer",
    "logits-head": "a scale a head",
    "logits-row": "a scale a query",
}


def kind_of(family: str) -> str:
    """What a family quantises, in words."""
    return KINDS.get(family.partition("-")[0], family)


def scale_of(family: str) -> str:
    """What shares a scale in a family, in words."""
    kind, _, group = family.partition("w-group")
    if not kind and group:
        return f"a scale {group} inputs of a channel"
    return SCALES.get(family, family)


def perplexity(result: Result | None) -> str:
    """The value with its difference to full precision."""
    if result is None:
        return "–"
    if result.perplexity is None:
        return "none"
    value = style.number(result.perplexity, 4)
    if result.delta is None:
        return value
    return f"{value} ({signed(result.delta)})"


def signed(delta: float) -> str:
    """A difference with its sign; below 100 to three places, so that a column compares."""
    size = f"{abs(delta):.3f}" if abs(delta) < 100 else style.number(abs(delta))
    return ("−" if delta < 0 else "+") + size


def accuracies(result: Result | None) -> str:
    """By log-likelihood, then by log-likelihood a character where there is that."""
    if result is None or result.accuracy is None:
        return "–"
    shares = (result.accuracy, result.accuracy_normalised)
    return ", ".join(style.percent(share) for share in shares if share is not None)


def has_questions(models: Sequence[Quantized]) -> bool:
    return any(result.accuracy is not None for m in models for result in m.results.values())


def questions(model: Quantized) -> str:
    """What was asked, and what guessing gives."""
    asked, file = model.header.get("questions") or 0, model.header.get("choices")
    return f"{asked:,} questions of {file}, chance {style.percent(model.header['chance'])}"


def to_console(model: Quantized) -> "Group":
    """One model's results; under them what could not be measured, and why."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=escape(model.name), title_justify="left", title_style="bold")
    table.add_column("scheme", no_wrap=True)
    table.add_column("perplexity", justify="right")
    table.add_column("Δ", justify="right")
    asked = has_questions([model])
    if asked:
        table.add_column("accuracy", justify="right")
        table.add_column("by length", justify="right")
    for name, result in model.results.items():
        value = "none" if result.perplexity is None else style.number(result.perplexity, 4)
        delta = "" if result.delta is None else signed(result.delta)
        cells = [value, delta]
        if asked:
            shares = (result.accuracy, result.accuracy_normalised)
            cells += ["–" if share is None else style.percent(share) for share in shares]
        table.add_row(escape(name or "full precision"), *cells)
    notes = [Text(f"  {note}") for note in remarks(model)]
    if asked:
        notes.insert(0, Text(f"  {questions(model)}"))
    return Group(table, *notes)


def remarks(model: Quantized) -> list[str]:
    """What could not be measured and why, what was left out, and layers that nothing ran."""
    reasons: dict[str, list[str]] = {}
    for name, result in model.results.items():
        if result.reason is not None:
            reasons.setdefault(result.reason, []).append(name or "full precision")
    found = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    left_out = model.header.get("left_out") or {}
    if left_out:
        total = sum(left_out.values()) + int(model.header.get("quantized_parameters", 0))
        share = style.percent(sum(left_out.values()) / total)
        example = next(iter(left_out))
        found.append(
            f"not in linear layers, so in full precision under every scheme: {len(left_out)} "
            f"tensors such as {example}, {share} of the matrices beside embeddings and head"
        )
    unused = {name for result in model.results.values() for name in result.unused}
    if unused:
        found.append(
            f"no text went through {len(unused)} of the quantised layers, such as {min(unused)}"
        )
    return found


def results_html(models: Sequence[Quantized], looks: dict[str, style.Look]) -> str:
    """A row a scheme, a column a model."""
    asked = has_questions(models)
    rows = [_row("full precision", "", [model.results.get(None) for model in models], asked)]
    kind = ""
    for name in schemes(models):
        results = [model.results.get(name) for model in models]
        family = next(r.family for r in results if r is not None)
        if family is not None and kind_of(family) != kind:
            kind = kind_of(family)
            rows.append(
                f'<tr><th scope="rowgroup" class="group" colspan="{len(models) + 1}">'
                f"{html.escape(kind)}</th></tr>"
            )
        rows.append(_row(name, "" if family is None else scale_of(family), results, asked))
    return _table("Perplexity by scheme", "scheme", models, looks, rows)


def bits_html(models: Sequence[Quantized], looks: dict[str, style.Look]) -> str:
    """A row a family, a column a model: the fewest bits within `CLOSE` of full precision."""
    rows = []
    for family in families(models):
        cells = []
        for model in models:
            few, results = model.fewest_bits(family), model.family(family)
            tried = [bits for bits, result in results.items() if result.perplexity is not None]
            text = "–" if not tried else f"{few}" if few else f"more than {tried[0]}"
            cells.append(f"<td>{html.escape(text)}</td>")
        rows.append(
            f'<tr><th scope="row">{html.escape(kind_of(family))}'
            f'<span class="unit">{html.escape(scale_of(family))}</span></th>{"".join(cells)}</tr>'
        )
    return _table(f"Fewest bits within {CLOSE * 100:g} %", "what is quantised", models, looks, rows)


def _row(name: str, unit: str, results: Sequence[Result | None], asked: bool) -> str:
    cells = []
    for result in results:
        reason = "" if result is None else result.reason or ""
        lines = [f'<span class="value">{html.escape(perplexity(result))}</span>']
        if asked and accuracies(result) != "–":
            lines.append(f'<span class="verdict">{html.escape(accuracies(result))}</span>')
        cells.append(f'<td title="{html.escape(reason)}">{"".join(lines)}</td>')
    note = f'<span class="unit">{html.escape(unit)}</span>' if unit else ""
    return f'<tr><th scope="row">{html.escape(name)}{note}</th>{"".join(cells)}</tr>'


def _table(
    label: str,
    corner: str,
    models: Sequence[Quantized],
    looks: dict[str, style.Look],
    rows: Sequence[str],
) -> str:
    heads = "".join(
        f'<th scope="col">{tables.swatch(looks[model.name])}{html.escape(model.name)}</th>'
        for model in models
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(label)}">'
        f'<table class="quantization"><thead><tr><th scope="col">{html.escape(corner)}</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
