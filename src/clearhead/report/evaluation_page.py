"""The evaluations on a page: a table a task, heat-maps of depth and length, loss by position.

A number is the mean over seeds, and in tables and curves over depths; ± is one standard deviation
over seeds.
"""

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from clearhead.report import figures, style
from clearhead.report.evaluation_values import Row, place, setting, tasks, values
from clearhead.report.evaluations import Grid, column_name, scaling_name
from clearhead.report.records import Records
from clearhead.report.verdicts import holds, interval_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from clearhead.report.sections import Page

PLAIN = "none"  # the scaling that a curve shows
CAPTION = (
    "What each model does with texts of each length. A row names the model, the scaling of its "
    "rotary frequencies and the setting; numbers are means over depths and seeds. Under a number "
    "stands its difference to the first model’s under the same setting, by Welch’s t over seeds; "
    "the error of drawing keys or documents is in its interval where records have them singly."
)


def section(page: "Page") -> str:
    """The section on all evaluations of all sets of records; empty where there is none."""
    content = ""
    for label, records in page.sets():
        for task in tasks(records):
            shown = "".join(_shown(page, label, records, task))
            name = f"{label}: {task}" if label else task
            content += f'<div class="evaluation"><h3>{html.escape(name)}</h3>{shown}</div>'
    if not content:
        return ""
    return (
        '<section id="evaluations"><h2>Evaluations</h2>'
        f'<p class="caption">{html.escape(CAPTION)}</p>{content}</section>'
    )


def _shown(page: "Page", label: str, records: Records, task: str) -> Iterator[str]:
    found = page.contrasts.evaluations[label, task]
    yield from (_table(grid, page.contrasts.threshold) for grid in found)
    for grid in found[:1]:
        panels = "".join(_heat_maps(page, records, task, grid.headline))
        if panels:
            yield f'<div class="maps small">{panels}</div>'
    curve = _by_position(page, records, task)
    if curve:
        yield curve
    for arm in records.arms():
        yield _by_document(records, arm, task)


def _table(grid: Grid, threshold: float) -> str:
    head = "".join(f"<th>{column_name(column)}</th>" for column in grid.columns)
    body = []
    for row in grid.rows:
        cells = "".join(_cell(grid, row, one, threshold) for one in grid.columns)
        body.append(f'<tr><th scope="row">{html.escape(row)}</th>{cells}</tr>')
    by_length = ", by length in tokens" if any(grid.columns) else ""
    title = html.escape(grid.headline.replace("_", " ") + by_length)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr><th scope="row">{title}</th>{head}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(grid: Grid, row: str, column: int, threshold: float) -> str:
    verdict, detail = grid.verdict(row, column, threshold), ""
    if verdict:
        difference = grid.differences[row, column]
        bold = " decided" if holds(difference, threshold) else ""
        verdict = f'<span class="verdict{bold}">{html.escape(verdict)}</span>'
        detail = html.escape(interval_in_words(difference, "difference").removeprefix("; "))
    return f'<td title="{detail}">{html.escape(grid.text(row, column))}{verdict}</td>'


def _by_document(records: Records, arm: str, task: str) -> str:
    """One model's perplexity of each text, by length, without scaling; folded away."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in records.of(arm):
        plain = [c for c in run.cells if c["task"] == task and scaling_name(c["at"]) == PLAIN]
        latest = {place(cell): cell for cell in plain}
        for cell in latest.values():
            for one in cell["result"].get("documents", ()):
                by_length = found.setdefault(one["document"], defaultdict(list))
                if one["perplexity"] is not None:  # too large for a number
                    by_length[cell["at"].get("length", 0)].append(one["perplexity"])
    if not found:
        return ""
    lengths = sorted({length for by_length in found.values() for length in by_length})
    head = "".join(f"<th>{column_name(length)}</th>" for length in lengths)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{_mean(by_length.get(length))}</td>" for length in lengths)
        + "</tr>"
        for name, by_length in found.items()
    )
    return (
        f"<details><summary>Perplexity of {html.escape(arm)} by document, without scaling"
        '</summary><div class="scroll" tabindex="0"><table><thead><tr><th scope="row">perplexity, '
        f"by length in tokens</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _mean(values: list[float] | None) -> str:
    return style.number(fmean(values)) if values else "–"


def _heat_maps(page: "Page", records: Records, task: str, headline: str) -> Iterator[str]:
    """A panel a row: depth down, length across; only for what was measured at several depths."""
    for row, columns in values(records, task, headline, apart=("depth",)).items():
        depths = sorted({depth for _, depth in columns if depth is not None})
        if len(depths) < 2:
            continue
        means = {key: summary.mean for key, summary in columns.items()}
        intervals = _intervals(records, task, row) if headline == "accuracy" else {}
        figure = _heat_map(means, depths, intervals)
        plot = page.place(figure, f"{headline} of {row.name} by depth and length", "cells")
        yield f'<figure class="panel"><h4>{html.escape(row.name)}</h4>{plot}</figure>'


def _intervals(records: Records, task: str, row: Row) -> dict[tuple[Any, ...], str]:
    """Each cell's 95 % interval by (length, depth), of one seed; several have a spread instead."""
    runs = [run for run in records.of(row.arm) if any(c["task"] == task for c in run.cells)]
    found = {}
    for cell in runs[0].cells if len(runs) == 1 else ():
        at, result = cell["at"], cell["result"]
        if cell["task"] == task and setting(at) == row.setting and result.get("low") is not None:
            text = f", 95 % interval {result['low']:.2f} to {result['high']:.2f}"
            found[at.get("length", 0), at.get("depth")] = text
    return found


def _heat_map(
    values: Mapping[tuple[Any, ...], float],
    depths: list[float],
    intervals: Mapping[tuple[Any, ...], str],
) -> "go.Figure":
    import plotly.graph_objects as go

    lengths = sorted({length for length, _ in values})
    figure = figures.new("length in tokens", "depth", showlegend=False)
    heat = go.Heatmap(
        x=[f"{length:,}" for length in lengths],
        y=[f"{100 * depth:g} %" for depth in depths],
        z=[[values.get((length, depth)) for length in lengths] for depth in depths],
        zmin=0,
        zmax=max(1.0, *values.values()),
        colorscale=style.scale(style.SEQUENTIAL),
        showscale=False,
        xgap=2,
        ygap=2,
        texttemplate="%{z:.2f}" if len(lengths) <= 8 else "",
        customdata=[[intervals.get((n, depth), "") for n in lengths] for depth in depths],
        hovertemplate="%{y} deep in %{x} tokens: %{z:.3f}%{customdata}<extra></extra>",
    )
    figure.add_trace(heat)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", title_standoff=10)
    return figure


def _by_position(page: "Page", records: Records, task: str) -> str:
    """The mean loss up to each position of the longest texts, a line a model."""
    import plotly.graph_objects as go

    figure = figures.new("tokens of context, up to (log scale)", "cumulative loss (nats a token)")
    for arm in records.arms():
        curves: dict[int, list[float]] = defaultdict(list)
        for run in records.of(arm):
            longest = _longest(run.cells, task)
            for point in longest.get("positions", ()) if longest else ():
                curves[point["to"]].append(point["cumulative"])
        if curves:
            places = sorted(curves)
            line = go.Scatter(
                x=places,
                y=[fmean(curves[place]) for place in places],
                name=style.plain(arm),
                mode="lines+markers",
                line={"color": page.looks[arm].colour, "width": 2},
                marker={"symbol": page.looks[arm].symbol, "size": 6},
                hovertemplate="%{x}: %{y:.4f}",
            )
            figure.add_trace(line)
    if not figure.data:
        return ""
    figure.update_xaxes(type="log")
    plot = page.place(figure, "cumulative loss by position", "curve")
    note = "Without scaling; every position counts alike, whatever the number of tokens there."
    return (
        f'{page.key_list()}<div class="pair"><figure class="panel">'
        "<h4>Loss of growing contexts</h4>"
        f"{plot}<figcaption>{note}</figcaption></figure></div>"
    )


def _longest(cells: list[dict[str, Any]], task: str) -> dict[str, Any] | None:
    mine = [c for c in cells if c["task"] == task and scaling_name(c["at"]) == PLAIN]
    best = max(mine, key=lambda cell: cell["at"].get("length", 0), default=None)
    return None if best is None else best["result"]
