"""The comparison table: one row an arm, with mean ± spread over seeds and honest differences."""

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead.report import style
from clearhead.report.records import Records, ordered_maps
from clearhead.report.statistics import Difference, Verdict, compare, summarize
from clearhead.report.verdicts import holds, interval_in_words, verdict_in_words

if TYPE_CHECKING:
    from rich.console import Group

_COST = "Cost"
_FIRST_TOKEN = "First token’s attention"
_NOTHING = '<span class="muted">–</span>'


@dataclass(frozen=True, kw_only=True)
class Column:
    """One quantity: `metric` at `dimensions`, or `header` of the run; shown is value × scale."""

    group: str
    title: str
    unit: str = ""
    metric: str = ""
    header: str = ""
    dimensions: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    by_map: bool = False


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One number of a cell; `name` tells apart the maps of differential attention."""

    name: str
    text: str
    detail: str
    difference: Difference | None


@dataclass(frozen=True, kw_only=True)
class Row:
    arm: str
    seeds: str
    cells: tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The comparison of the arms of one label."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str

    def differences(self) -> Iterator[Difference]:
        """All differences that the table shows."""
        for row in self.rows:
            for cell in row.cells:
                yield from (entry.difference for entry in cell if entry.difference is not None)

    def groups(self) -> dict[str, int]:
        """Column groups in order, with their width in columns."""
        widths: dict[str, int] = {}
        for column in self.columns:
            widths[column.group] = widths.get(column.group, 0) + 1
        return widths


def comparison(records: Records) -> Table:
    """Compare the arms in `records` (of one label). Columns without data are left out."""
    arms = records.arms()
    baseline = arms[0] if arms else ""
    columns = [
        column
        for column in _columns(records)
        if any(_entries(records, arm, column, baseline) for arm in arms)
    ]
    rows = [
        Row(
            arm=arm,
            seeds=seeds_of(arm, baseline, len(records.of(arm))),
            cells=tuple(_entries(records, arm, column, baseline) for column in columns),
        )
        for arm in arms
    ]
    return Table(columns=tuple(columns), rows=tuple(rows), baseline=baseline)


def seeds_in_words(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def seeds_of(arm: str, baseline: str, n: int) -> str:
    """With one seed no difference of the row is decided: said once, not in every cell."""
    return str(Verdict.ONE_SEED) if n == 1 and arm != baseline else seeds_in_words(n)


def chance_floor(records: Records) -> float | None:
    """The argmax share that attention without any preference would show; None if not recorded."""
    values = [
        float(line["value"])
        for run in records.runs
        for line in run.measures.values()
        if line["metric"] == "chance_floor" and line["value"] is not None
    ]
    summary = summarize(values)
    return None if summary is None else summary.mean


def _columns(records: Records) -> Iterator[Column]:
    yield Column(group="Parameters", title="all", unit="M", header="parameters", scale=1e-6)
    yield Column(
        group="Parameters",
        title="without embeddings",
        unit="M",
        header="non_embedding_parameters",
        scale=1e-6,
    )
    group = "Validation perplexity by length of text"
    yield Column(group=group, title="overall", metric="perplexity")
    trained = records.sequence_length()
    for length in records.dimension("perplexity", "length"):
        yield Column(
            group=group,
            title=f"{length / trained:g} ×" if trained else f"{length}",
            unit=f"{length:,} tokens",
            metric="perplexity",
            dimensions={"length": length},
        )
    for length in records.dimension("masked loss", "length"):
        yield Column(
            group="Validation loss at hidden tokens",
            title=f"{length / trained:g} ×" if trained else f"{length}",
            unit=f"nats; {length:,} tokens",
            metric="masked loss",
            dimensions={"length": length},
        )
    floor = chance_floor(records)
    yield Column(
        group=_FIRST_TOKEN,
        title="argmax share",
        unit="% of query–head pairs"
        + ("" if floor is None else f"; chance {style.percent(floor)}"),
        metric="first_token_argmax_share",
        scale=100,
        by_map=True,
    )
    yield Column(
        group=_FIRST_TOKEN,
        title="mean mass",
        unit="%",
        metric="first_token_mass",
        scale=100,
        by_map=True,
    )
    yield Column(
        group=_FIRST_TOKEN,
        title="mass on no token",
        unit="%",
        metric="null_mass",
        scale=100,
        by_map=True,
    )
    for metric, group in (
        ("kurtosis", "Kurtosis of hidden states"),
        ("kurtosis_rotated", "Kurtosis in OrthoAdam’s basis"),
        ("largest_activation", "Largest activation"),
    ):
        for tokens, title in (("first", "first token"), ("rest", "other tokens")):
            yield Column(group=group, title=title, metric=metric, dimensions={"tokens": tokens})
    yield Column(group=_COST, title="training speed", unit="tokens/s", metric="tokens_per_second")
    yield Column(
        group=_COST,
        title="peak memory",
        unit="MiB",
        metric="peak_memory_bytes",
        scale=2.0**-20,
    )


def _entries(records: Records, arm: str, column: Column, baseline: str) -> tuple[Entry, ...]:
    if not column.by_map:
        return tuple(_entry(records, arm, column, baseline, "", column.dimensions))
    entries: list[Entry] = []
    for name in ordered_maps(records.dimension(column.metric, "map", arm)):
        shown = "" if name == "softmax" else name
        entries.extend(_entry(records, arm, column, baseline, shown, {"map": name}))
    return tuple(entries)


def _entry(
    records: Records,
    arm: str,
    column: Column,
    baseline: str,
    name: str,
    dimensions: dict[str, Any],
) -> Iterator[Entry]:
    values = _values(records, arm, column, dimensions)
    summary = summarize(list(values.values()))
    if summary is None:
        reason = records.reason(arm, column.metric, **dimensions)
        if column.group == _COST and records.values(arm, column.metric, **dimensions):
            reason = "trained on another device"
        if reason is not None:
            yield Entry(name=name, text="none", detail=reason, difference=None)
        return
    detail = "one seed"
    if summary.interval is not None:
        low, high = (style.number(bound, 4) for bound in summary.interval)
        detail = f"{summary.n} seeds, 95 % interval of the mean: {low} to {high}"
    difference = None
    if arm != baseline and column.metric:
        other = _values(records, baseline, column, dimensions)
        if column.by_map and not other:  # maps that plain attention lacks are held against its one
            other = _values(records, baseline, column, {"map": "softmax"})
        if other:
            difference = compare(list(values.values()), list(other.values()))
        if difference is not None:
            detail += interval_in_words(difference, f"difference to {baseline}")
    yield Entry(
        name=name,
        text=style.with_spread(summary.mean, summary.deviation)
        if column.metric
        else style.number(summary.mean, 4),
        detail=detail,
        difference=difference,
    )


def _values(
    records: Records, arm: str, column: Column, dimensions: dict[str, Any]
) -> dict[int, float]:
    if column.header:
        found = {run.seed: run.header.get(column.header) for run in records.of(arm)}
        return {seed: value * column.scale for seed, value in found.items() if value is not None}
    alike = records.on_one_device() if column.group == _COST else records
    values = alike.values(arm, column.metric, **dimensions)
    return {seed: value * column.scale for seed, value in values.items()}


def to_html(table: Table, looks: dict[str, style.Look], threshold: float) -> str:
    """The table as an HTML fragment; every text of the records is escaped.

    Args:
        threshold: the largest p of a difference that holds among all comparisons of the page.
    """
    groups = "".join(
        f'<th colspan="{width}" scope="colgroup">{html.escape(group)}</th>'
        for group, width in table.groups().items()
    )
    titles = "".join(
        f'<th scope="col">{html.escape(column.title)}'
        + (f'<span class="unit">{html.escape(column.unit)}</span>' if column.unit else "")
        + "</th>"
        for column in table.columns
    )
    rows = "".join(_row_html(row, table, looks, threshold) for row in table.rows)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison table">'
        f'<table class="comparison"><thead><tr><th rowspan="2" scope="col">model</th>{groups}</tr>'
        f"<tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row_html(row: Row, table: Table, looks: dict[str, style.Look], threshold: float) -> str:
    shown = ["".join(_entry_html(entry, threshold) for entry in cell) for cell in row.cells]
    cells = "".join(f"<td>{one or _NOTHING}</td>" for one in shown)
    role = "reference, " if row.arm == table.baseline else ""
    return (
        f'<tr><th scope="row">{swatch(looks[row.arm])}'
        f'<span class="name" title="{html.escape(row.arm)}">{html.escape(row.arm)}</span>'
        f'<span class="unit">{role}{row.seeds}</span></th>{cells}</tr>'
    )


def _entry_html(entry: Entry, threshold: float) -> str:
    name = f'<span class="map">{html.escape(entry.name)}</span>' if entry.name else ""
    verdict = ""
    words = "" if entry.difference is None else verdict_in_words(entry.difference, threshold)
    if entry.difference is not None and words:
        decided = holds(entry.difference, threshold)
        verdict = (
            f'<span class="verdict{" decided" if decided else ""}">{html.escape(words)}</span>'
        )
    elif entry.text == "none":
        verdict = f'<span class="verdict">{html.escape(entry.detail)}</span>'
    return (
        f'<div class="entry" title="{html.escape(entry.detail)}">{name}'
        f'<span class="value">{html.escape(entry.text)}</span>{verdict}</div>'
    )


def swatch(look: style.Look) -> str:
    """A dot in an arm's colour."""
    return f'<i class="swatch" style="--light:{look.colour};--dark:{look.dark}"></i>'


def to_console(table: Table, threshold: float) -> "Group":
    """The table for a terminal: as several narrow rich tables, one a theme."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table as RichTable

    parts = []
    for group in table.groups():
        part = RichTable(title=escape(group), title_justify="left", title_style="bold")
        part.add_column("model", no_wrap=True)
        part.add_column("seeds")
        shown = [index for index, column in enumerate(table.columns) if column.group == group]
        for index in shown:
            column = table.columns[index]
            unit = f"\n({column.unit})" if column.unit else ""
            part.add_column(escape(column.title + unit), justify="right")
        for row in table.rows:
            cells = [
                escape("\n".join(_entry_text(e, threshold) for e in row.cells[index]) or "–")
                for index in shown
            ]
            part.add_row(escape(row.arm), row.seeds, *cells)
        parts.append(part)
    return Group(*parts)


def _entry_text(entry: Entry, threshold: float) -> str:
    text = f"{entry.name}: {entry.text}" if entry.name else entry.text
    words = "" if entry.difference is None else verdict_in_words(entry.difference, threshold)
    if words:
        return f"{text}\n{words}"
    return f"{text}\n{entry.detail}" if entry.text == "none" else text
