"""The page of a quantisation: bits against perplexity, for one model or several."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.records.files import write_text
from clearhead.report import figures, sections, style, tables
from clearhead.report import quantization_tables as words
from clearhead.report.page import shell
from clearhead.report.quantization import CLOSE, Quantized, families
from clearhead.report.records import Records

FULL = "full"  # the tick of full precision


def write_quantization(models: Sequence[Quantized], path: Path, *, title: str) -> None:
    """Write the page on `models` to `path`: whole or not at all.

    Raises:
        ClearheadError: the file cannot be written.
    """
    write_text(path, render(models, title=title))


def render(models: Sequence[Quantized], *, title: str) -> str:
    """The page as HTML text."""
    looks = style.looks([model.name for model in models])
    page = sections.Page(records=Records(runs=()), looks=looks)
    makers = (_curves, _fewest, _numbers, _made)
    body = "\n".join(filter(None, (maker(page, models) for maker in makers)))
    return shell(page, title=title, lead=_lead(models), body=body)


def _lead(models: Sequence[Quantized]) -> str:
    """What was asked, and under it the dearest and the cheapest answer of each model."""
    names = [model.name for model in models]
    who = names[0] if len(names) == 1 else f"{len(names)} models"
    text = (
        f"What few bits cost {who}: perplexity with weights, activations or attention logits "
        "rounded, beside that of full precision."
    )
    cells = "".join(
        f'<div class="now"><b>{html.escape(model.name)}</b>'
        f"<p>{html.escape(_finding(model))}</p></div>"
        for model in models
    )
    return f'<p class="lead">{html.escape(text)}</p><div class="findings">{cells}</div>'


def _finding(model: Quantized) -> str:
    full = model.full.perplexity
    if full is None:
        return f"No perplexity in full precision: {model.full.reason}."
    text = f"Perplexity {style.number(full, 4)} in full precision."
    measured = [r for r in model.results.values() if r.scheme and r.delta is not None]
    if measured:
        worst = max(measured, key=lambda result: result.delta or 0.0)
        best = min(measured, key=lambda result: result.delta or 0.0)
        text += f" {worst.scheme} costs most, {words.signed(worst.delta or 0.0)}"
        if best is not worst:
            text += f"; {best.scheme} least, {words.signed(best.delta or 0.0)}"
        text += "."
    missing = sum(r.perplexity is None for r in model.results.values())
    if missing:
        text += f" {missing} schemes could not be measured."
    return text


def _curves(page: sections.Page, models: Sequence[Quantized]) -> str:
    """A panel a family, in the same scale as its kind's others."""
    names = families(models)
    if not names:
        return ""
    legend = "".join(
        f"<span>{tables.swatch(page.looks[model.name])}{html.escape(model.name)}</span>"
        for model in models
    )
    content = f'<div class="legends">{legend}</div>'
    for kind in dict.fromkeys(map(words.kind_of, names)):
        kin = [name for name in names if words.kind_of(name) == kind]
        shown = [value for name in kin for m in models for _, value in _points(m, name)]
        cells = "".join(_panel(page, models, name, shown) for name in kin)
        content += f'<h3 class="kind">{html.escape(kind)}</h3><div class="maps">{cells}</div>'
    return _section(
        "bits",
        "Bits against perplexity",
        "Fewer bits to the right, full precision at the left; lower is better. The panels under "
        "one heading share their scale.",
        content,
    )


def _panel(
    page: sections.Page, models: Sequence[Quantized], family: str, shown: Sequence[float]
) -> str:
    title = words.scale_of(family)
    figure = figures.new("bits", "perplexity", showlegend=False)
    ticks = sorted({bits for m in models for bits, _ in _points(m, family)}, reverse=True)
    names = [FULL if bits == math.inf else f"{bits:g}" for bits in ticks]
    for model in models:
        figure.add_trace(_line(model, family, page.looks[model.name]))
    figure.update_xaxes(categoryorder="array", categoryarray=names, type="category")
    _scale(figure, shown)
    missing = [m.name for m in models if any(r.reason for r in m.family(family).values())]
    note = f"<figcaption>Not all measured: {html.escape(', '.join(missing))}.</figcaption>"
    return (
        f'<figure class="panel"><h3>{html.escape(title)}</h3>'
        f"{page.place(figure, f'Perplexity by bits: {title}', 'cells')}"
        f"{note if missing else ''}</figure>"
    )


def _points(model: Quantized, family: str) -> list[tuple[float, float]]:
    """(bits, perplexity), full precision at infinity; none where the family was not measured."""
    found = [(float(bits), r.perplexity) for bits, r in model.family(family).items()]
    points = [(bits, value) for bits, value in found if value is not None]
    if points and model.full.perplexity is not None:
        points.insert(0, (math.inf, model.full.perplexity))
    return points


def _line(model: Quantized, family: str, look: style.Look) -> Any:
    import plotly.graph_objects as go

    points = _points(model, family)
    return go.Scatter(
        x=[FULL if bits == math.inf else f"{bits:g}" for bits, _ in points],
        y=[value for _, value in points],
        name=style.plain(model.name),
        mode="lines+markers",
        line={"color": look.colour, "width": 2},
        marker={"color": look.colour, "size": 8, "symbol": look.symbol},
        hovertemplate="%{x} bits: %{y:.5g}",
    )


def _scale(figure: Any, shown: Sequence[float]) -> None:
    """The range of all `shown`, logarithmic where they span more than a factor of four."""
    if not shown:
        return
    low, high = min(shown), max(shown)
    if high >= 4 * low:
        figures.scale_axis(figure, "perplexity", shown)
    else:
        margin = 0.06 * (high - low) or 0.01 * high
        figure.update_yaxes(range=[low - margin, high + margin])


def _fewest(page: sections.Page, models: Sequence[Quantized]) -> str:
    content = words.bits_html(models, page.looks) if families(models) else ""
    return content and _section(
        "fewest",
        "How few are enough",
        f"The fewest of the measured bits at which perplexity is within {CLOSE * 100:g} % of "
        "full precision, and is so with every larger number measured.",
        content,
    )


def _numbers(page: sections.Page, models: Sequence[Quantized]) -> str:
    notes = "".join(
        f'<p class="note">{html.escape(model.name)}: {html.escape(remark)}.</p>'
        for model in models
        for remark in words.remarks(model)
    )
    caption = "Perplexity, and in brackets what the scheme adds to that of full precision."
    if words.has_questions(models):
        caption += (
            " Under it the share of multiple-choice questions answered right, by the "
            "log-likelihood of the answers and, where the lm-evaluation-harness does so too, by "
            "that divided by their characters."
        )
    return _section(
        "numbers", "All numbers", caption, words.results_html(models, page.looks) + notes
    )


def _made(page: sections.Page, models: Sequence[Quantized]) -> str:
    parts = []
    for model in models:
        facts = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
            for name, text in _facts(model)
        )
        parts.append(f"<h3>{html.escape(model.name)}</h3><dl>{facts}</dl>")
    return _section(
        "made",
        "How this was made",
        "Linear layers only, or attention logits only; embeddings, the output matrix, norms and "
        "hidden states in full precision. One text at a time, so that no scale is shared "
        "between texts.",
        "".join(parts),
    )


def _facts(model: Quantized) -> list[tuple[str, str]]:
    header = model.header
    versions = ", ".join(f"{k} {v}" for k, v in (header.get("versions") or {}).items())
    return [
        ("model", f"{header.get('path')}: {header.get('class')}, {header.get('dtype')}"),
        ("parameters", f"{header.get('parameters', 0):,}"),
        ("in linear layers", f"{header.get('quantized_parameters', 0):,}"),
        ("text", f"{header.get('tokens', 0):,} tokens in windows of {header.get('length', 0):,}"),
        ("calibration of “fine”", str(header.get("calibration") or "none")),
        ("questions", words.questions(model) if header.get("questions") else "none"),
        ("made with", f"{versions}; {header.get('device')}; {header.get('date')}"),
    ]


def _section(name: str, title: str, caption: str, content: str) -> str:
    return (
        f'<section id="{name}"><h2>{html.escape(title)}</h2>'
        f'<p class="caption">{html.escape(caption)}</p>{content}</section>'
    )
