"""The page of a diagnosis: one model, or two side by side."""

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clearhead.records.files import write_text
from clearhead.records.provenance import source_of
from clearhead.report import diagnosis_figures as figures
from clearhead.report import diagnosis_table as table
from clearhead.report import sections, style
from clearhead.report.diagnosis import Diagnosed
from clearhead.report.diagnosis_figures import Line
from clearhead.report.figures import Panel
from clearhead.report.narrative import enumerate_words
from clearhead.report.page import shell
from clearhead.report.records import Records


def write_diagnosis(models: Sequence[Diagnosed], path: Path, *, title: str) -> None:
    """Write the page on `models` to `path`: whole or not at all.

    Raises:
        ClearheadError: the file cannot be written.
    """
    write_text(path, render(models, title=title))


def render(models: Sequence[Diagnosed], *, title: str) -> str:
    """The page as HTML text."""
    looks = style.looks([model.name for model in models])
    page = sections.Page(records=Records(runs=()), looks=looks)
    makers = (_attention, _hidden, _order, _stream, _longer, _numbers, _made)
    body = "\n".join(filter(None, (maker(page, models) for maker in makers)))
    return shell(page, title=title, lead=_lead(models), body=body)


def _lead(models: Sequence[Diagnosed]) -> str:
    """What was read, and under it the findings on each model side by side."""
    first = models[0].header
    text = (
        f"{first.get('windows', 0):,} texts of {first.get('length', 0):,} tokens through "
        + enumerate_words([model.name for model in models])
        + ": where attention goes, how activations spread, whether order and signals hold."
    )
    cells = "".join(
        f'<div class="now"><b>{html.escape(model.name)}</b>{_findings(model)}</div>'
        for model in models
    )
    return f'<p class="lead">{html.escape(text)}</p><div class="findings">{cells}</div>'


def _findings(model: Diagnosed) -> str:
    lines = [
        f"<p>{html.escape(line['finding'][:1].upper() + line['finding'][1:])}. "
        f"{html.escape(line['advice'][:1].upper() + line['advice'][1:])}. "
        f'<span class="note">{html.escape(table.support_in_words(line))}</span></p>'
        for line in model.advice
    ]
    lines = lines or ["<p>No number here supports advice.</p>"]
    lines += [
        f"<p>Not measured: {html.escape(note['part'])}: {html.escape(note['reason'])}.</p>"
        for note in model.notes
    ]
    return "".join(lines)


def _section(name: str, title: str, caption: str, content: str) -> str:
    return content and (
        f'<section id="{name}"><h2>{html.escape(title)}</h2>'
        f'<p class="caption">{html.escape(caption)}</p>{content}</section>'
    )


def _pair(page: sections.Page, panels: Iterable[Panel | None], shape: str = "curve") -> str:
    cells, told = [], ""
    for panel in filter(None, panels):
        cells.append(sections.framed(page, "", panel, shape))
        if shape == "curve" and not panel.own_legend:
            told = page.key_list()
    kind = "maps small" if shape == "cells" else "pair"
    return f'{told}<div class="{kind}">{"".join(cells)}</div>' if cells else ""


def _numbers(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    return _section(
        "numbers",
        "All the numbers",
        "Every number by a definition of its own name; those of one kind do not compare across "
        "definitions. A dash is what a model does not have or could not be asked.",
        table.to_html(models, page.looks),
    )


def _attention(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    looks = page.looks

    def lines(metric: str) -> list[Line]:
        names = list(dict.fromkeys(name for model in models for name in model.maps()))
        return [
            Line(metric=metric, name="" if name == "softmax" else name, dimensions={"map": name})
            for name in names
        ]

    def panel(title: str, axis: str, metric: str, note: str = "") -> Panel | None:
        return figures.by_layer(models, looks, title, axis, lines(metric), note=note)

    content = _heads(page, models) + _pair(
        page,
        (
            panel("Weight on the first token", "mean weight", "first_token_mass"),
            panel(
                "Sink rate",
                "share of (text, head) pairs",
                "sink_rate_0.3",
                "Pairs whose mean weight on the first token is above 0.3.",
            ),
            panel("Entropy of attention", "nats", "entropy"),
            panel("Weight on no key", "mean weight", "null_mass"),
            figures.distances(models, looks),
            figures.by_layer(models, looks, "λ of the difference", "λ", [Line(metric="lambda")]),
            figures.by_layer(
                models,
                looks,
                "Negative share of the difference",
                "share of Σ|weight|",
                [Line(metric="negative_share")],
            ),
        ),
    )
    return _section(
        "attention",
        "Where attention goes",
        "A head with nothing to find parks its weight on the first token. The maps say for how "
        "many queries (in\u00a0%) it gets the largest weight of all, head by head.",
        content,
    )


def _heads(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    shares = [
        line["value"]
        for model in models
        for line in model.measures.values()
        if line["metric"] == "first_token_argmax_share" and line["value"] is not None
    ]
    panels = []
    for model in models:
        for name in model.maps():
            figure = figures.heads(model, name, max(0.1, *shares))
            if figure is not None:
                title = model.name if name == "softmax" else f"{model.name} · {name}"
                panels.append(Panel(title=title, figure=figure))
    return _pair(page, panels, "cells")


def _hidden(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    looks = page.looks

    def kurtosis(title: str, *lines: Line, note: str = "3 is a Gaussian.") -> Panel | None:
        return figures.by_layer(models, looks, title, "kurtosis", lines, log=True, note=note)

    first, rest = {"tokens": "first"}, {"tokens": "rest"}
    content = _pair(
        page,
        (
            kurtosis(
                "Kurtosis per token, over channels",
                Line(metric="kurtosis", name="first token", dimensions=first),
                Line(metric="kurtosis", name="others", dimensions=rest),
            ),
            kurtosis(
                "Kurtosis of many tokens together",
                Line(metric="kurtosis_pooled", name="pooled"),
                Line(metric="kurtosis_flattened", name="flattened by text"),
            ),
            kurtosis(
                "Kurtosis of channels’ mean squares",
                Line(metric="kurtosis_neurons"),
                note="1 where all channels are equally large.",
            ),
            figures.by_layer(
                models,
                looks,
                "Excess kurtosis per token",
                "kurtosis − 3",
                [
                    Line(metric="kurtosis_excess", name="mean"),
                    Line(metric="kurtosis_excess_relu", name="not below 0, not centred"),
                ],
            ),
            figures.by_layer(
                models,
                looks,
                "Largest activation",
                "largest |x|",
                [
                    Line(metric="largest_activation", name="first token", dimensions=first),
                    Line(metric="largest_activation", name="others", dimensions=rest),
                ],
                log=True,
                note="Mean over tokens of the largest channel.",
            ),
            figures.by_layer(
                models,
                looks,
                "Largest attention logit",
                "largest |logit|",
                [Line(metric="logit_top_1")],
                log=True,
            ),
            figures.ranks(models, looks, "hidden", "Hidden states by magnitude"),
            figures.ranks(models, looks, "logit", "Attention logits by magnitude"),
        ),
    )
    return _section(
        "hidden",
        "Outliers in the hidden states",
        "What single channels do that others do not, by every definition in use, and how far the "
        "largest numbers stand from the median: that distance is what low bits pay for.",
        content + _channels(models),
    )


def _channels(models: Sequence[Diagnosed]) -> str:
    out = ""
    for model in models:
        if not model.channels:
            text = "no channel reaches 30 × its layer’s median"
            out += f'<p class="note"><b>{html.escape(model.name)}</b>: {html.escape(text)}.</p>'
            continue
        items = "".join(
            f"<dd>{html.escape(table.channel_in_words(line))}</dd>" for line in model.channels
        )
        many = f"{model.channels[0]['of']:,} outlier channels, the largest first"
        out += (
            f"<details><summary>{html.escape(model.name)}: {html.escape(many)}</summary>"
            f"<dl>{items}</dl></details>"
        )
    return out


def _order(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    looks = page.looks
    content = _pair(
        page,
        (
            figures.by_layer(
                models,
                looks,
                "Rotary pairs in the anomalous zone",
                "share",
                [
                    Line(metric="anomalous_before", name="before"),
                    Line(metric="anomalous_after", name="after"),
                    Line(metric="anomalous_weight_before", name="before, by amplitude"),
                ],
                note="Pairs whose initial angle makes nearer keys score lower; a half by chance.",
            ),
            figures.by_layer(
                models,
                looks,
                "Nearer keys that score lower",
                "share",
                [
                    Line(metric="order_broken_before", name="queries of the text, before"),
                    Line(metric="order_broken_after", name="after"),
                    Line(metric="order_broken_content", name="content held, sampled"),
                ],
                note="The nearest 4 keys against the next 12.",
            ),
            figures.decay(models, looks),
        ),
    )
    return _section(
        "order",
        "Order",
        "Rotary positions let scores rise with distance wherever the angle between a query and a "
        "key starts beyond π; collinear attention starts it at zero.",
        content,
    )


def _stream(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    looks = page.looks
    content = _pair(
        page,
        (
            figures.by_layer(
                models,
                looks,
                "Token similarity",
                "mean cosine",
                [Line(metric="similarity")],
                note="1: every token of a text is the same.",
            ),
            figures.by_layer(
                models,
                looks,
                "Effective rank",
                "rank",
                [
                    Line(metric="effective_rank", name="all tokens"),
                    Line(metric="effective_rank_without_first", name="without the first"),
                ],
                note="exp of the entropy of the singular values; of the first four texts.",
            ),
            figures.by_layer(
                models,
                looks,
                "Norm of the stream",
                "√Σx²",
                [
                    Line(metric="norm_first", name="first token"),
                    Line(metric="norm_rest", name="others"),
                ],
                log=True,
            ),
            figures.by_layer(
                models,
                looks,
                "Effective rank of attention",
                "share of the tokens",
                [Line(metric="matrix_rank")],
                note="Of the matrix that multiplies the values, a head; 1 for the identity.",
            ),
            *(figures.spectrum(model) for model in models),
        ),
    )
    return _section(
        "stream",
        "Signal propagation",
        "Whether tokens stay apart on their way up. Similarity that climbs to one and a rank that "
        "falls to one are rank collapse: what comes out no longer says what went in.",
        content,
    )


def _longer(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    panels = []
    for curve, title, axis in (
        ("largest_logit_by_position", "Largest logit by the query’s position", "largest |logit|"),
        ("logit_by_position", "Logits of the last queries, by key", "mean logit"),
    ):
        panels += [figures.positions(model, curve, title, axis) for model in models]
    return _section(
        "longer",
        "Beyond the training length",
        "One text longer than those of the training. Scores that jump at the mark, or a last layer "
        "that no longer looks at near tokens, are why perplexity breaks there.",
        _pair(page, panels),
    )


def _made(page: sections.Page, models: Sequence[Diagnosed]) -> str:
    content = "".join(
        f'<div class="made"><p class="tag now"><b>{html.escape(model.name)}</b></p>'
        f"{_facts(model.header)}</div>"
        for model in models
    )
    return _section(
        "made",
        "How this was made",
        "Every number is over all queries, heads and tokens read, but for what is named as "
        "sampled: the median (one number in 8, one query in 16), the effective rank (4 texts) and "
        "the order with content held (64 pairs a text and layer).",
        content,
    )


def _facts(header: dict[str, Any]) -> str:
    header = {**header, "source": source_of(header)}
    shown = {
        name.replace("_", " "): header[name]
        for name in (
            "command",
            "architecture",
            "parameters",
            "device",
            "dtype",
            "versions",
            "source",
            "windows",
            "length",
            "seconds",
            "peak_memory_bytes",
            "probes_hold_bytes",
            "data",
            "date",
        )
        if header.get(name)
    }
    items = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{_shown(name, value)}</dd>"
        for name, value in shown.items()
    )
    return f"<dl>{items}</dl>"


def _shown(name: str, value: Any) -> str:
    if name == "command":
        return f"<pre>{html.escape(str(value))}</pre>"
    if isinstance(value, dict):
        value = ", ".join(f"{key} {json.dumps(item)}" for key, item in value.items())
    if name.endswith("bytes"):
        value = f"{value / 2**20:,.0f} MiB"
    return html.escape(f"{value:,}" if isinstance(value, int) else str(value))
