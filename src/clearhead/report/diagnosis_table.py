"""The table of a diagnosis: one row a number, one column a model; for a terminal and for a page."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead.report import style
from clearhead.report.diagnosis import Diagnosed

if TYPE_CHECKING:
    from rich.console import Group

MISSING = "–"
Show = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of every model; `note` says what would be read out of it otherwise wrongly."""

    group: str
    title: str
    cells: tuple[str, ...]
    note: str = ""


def rows(models: Sequence[Diagnosed]) -> list[Row]:
    """The rows that at least one model can fill."""
    out = [*_attention(models), *_outliers(models), *_order(models), *_stream(models)]
    return [row for row in out if any(cell != MISSING for cell in row.cells)]


def _attention(models: Sequence[Diagnosed]) -> list[Row]:
    out = _Rows("Attention", models)
    for name in dict.fromkeys(name for model in models for name in model.maps()):
        suffix = "" if name == "softmax" else f", {name}"
        for metric, title, show, note in _BY_MAP:
            out.add(f"{title}{suffix}", metric, show, note, map=name)
    out.add(
        "the same by chance",
        "chance_floor",
        style.percent,
        "largest weight on the first token without any preference",
    )
    out.add("entropy of equal weights", "entropy_ceiling", note="nats")
    out.rows.append(
        Row(group=out.group, title="λ, first and last layer", cells=tuple(map(_ends, models)))
    )
    return out.rows


_BY_MAP: tuple[tuple[str, str, Show, str], ...] = (
    (
        "first_token_argmax_share",
        "largest weight on the first token",
        style.percent,
        "share of (query, head) pairs",
    ),
    ("first_token_mass", "weight on the first token", style.percent, ""),
    (
        "sink_rate_0.3",
        "sink rate at 0.3",
        style.percent,
        "(text, head) pairs with more mean weight on the first token",
    ),
    ("null_mass", "weight on no key", style.percent, ""),
    ("entropy", "entropy", style.number, "nats"),
)


def _ends(model: Diagnosed) -> str:
    layers = model.by_layer("lambda")
    if not layers:
        return MISSING
    return f"{style.number(layers[min(layers)])}, {style.number(layers[max(layers)])}"


def _outliers(models: Sequence[Diagnosed]) -> list[Row]:
    shapes = _Rows("Kurtosis of the hidden states, mean over layers", models)
    gaussian = "3 is a Gaussian"
    for tokens, title in (("first", "first token"), ("rest", "other tokens")):
        shapes.add(f"per token, {title}", "kurtosis", note=gaussian, tokens=tokens)
    for metric, title, note in (
        ("kurtosis_excess", "per token, excess", "0 is a Gaussian"),
        ("kurtosis_excess_relu", "per token, excess, not below 0", "not centred"),
        ("kurtosis_pooled", "all numbers pooled", gaussian),
        ("kurtosis_flattened", "of each text flattened", gaussian),
        ("kurtosis_neurons", "of channels’ mean squares", "1 where all are equal"),
    ):
        shapes.add(title, metric, note=note)
    sizes = _Rows("Largest magnitudes", models)
    for kind, title in (("hidden", "hidden states"), ("logit", "attention logits")):
        for rank in (1, 2, 3, 10, 100):
            sizes.add(f"{title}, top {rank}", f"{kind}_top_{rank}")
        sizes.add(f"{title}, median", f"{kind}_median")
    counts = (str(model.channels[0]["of"]) if model.channels else "0" for model in models)
    note = "largest |x| at least 30 × the layer’s median"
    channels = Row(group=sizes.group, title="outlier channels", cells=tuple(counts), note=note)
    sizes.rows.append(channels)
    sizes.add("hidden states that are not finite", "non_finite_tokens", style.count)
    sizes.add("rows of logits that are not finite", "non_finite_rows", style.count)
    return shapes.rows + sizes.rows


def _order(models: Sequence[Diagnosed]) -> list[Row]:
    out = _Rows("Order", models)
    for metric, title, note in (
        ("anomalous_before", "rotary pairs in the anomalous zone", "of keys before the query"),
        ("anomalous_after", "rotary pairs in the anomalous zone, after", "of keys after it"),
        ("anomalous_weight_before", "the first, by amplitude", ""),
        ("order_broken_content", "keys that score lower when moved nearer", "sampled"),
        (
            "order_broken_before",
            "queries whose nearest keys score lower",
            "4 nearest against the next 12; a half without preference",
        ),
        ("order_broken_after", "the same, of keys after the query", ""),
    ):
        out.add(title, metric, style.percent, note)
    return out.rows


def _stream(models: Sequence[Diagnosed]) -> list[Row]:
    out = _Rows("Stream, after the last layer", models)
    out.last("token similarity", "similarity", note="mean cosine")
    out.last("effective rank", "effective_rank", note="first 4 texts")
    out.last("effective rank without the first token", "effective_rank_without_first")
    out.last("norm of the first token", "norm_first")
    out.last("norm of the others", "norm_rest")
    longer = _Rows("Beyond the training length", models)
    note = "last layer, 64 nearest keys"
    longer.last("weight on near keys, within it", "near_weight_trained", style.percent, note)
    longer.last("weight on near keys, at the end", "near_weight_beyond", style.percent)
    return out.rows + longer.rows


class _Rows:
    """Rows of one group, under construction."""

    def __init__(self, group: str, models: Sequence[Diagnosed]) -> None:
        self.group, self.models = group, models
        self.rows: list[Row] = []

    def add(
        self,
        title: str,
        metric: str,
        show: Show = style.number,
        note: str = "",
        **dimensions: str,
    ) -> None:
        """A measure that is pooled over layers."""
        values = [model.value(metric, **dimensions) for model in self.models]
        self._append(title, values, show, note)

    def last(self, title: str, metric: str, show: Show = style.number, note: str = "") -> None:
        """A measure of the last layer."""
        layers = [model.by_layer(metric) for model in self.models]
        values = [found[max(found)] if found else None for found in layers]
        self._append(title, values, show, note)

    def _append(self, title: str, values: Sequence[float | None], show: Show, note: str) -> None:
        cells = tuple(MISSING if value is None else show(value) for value in values)
        self.rows.append(Row(group=self.group, title=title, cells=cells, note=note))


def to_console(models: Sequence[Diagnosed]) -> "Group":
    """The table, the outlier channels, what could not be measured, and the advice."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=True, title="diagnosis", title_justify="left", title_style="bold")
    table.add_column("")
    for model in models:
        table.add_column(escape(model.name), justify="right", overflow="fold")
    group = ""
    for row in rows(models):
        if row.group != group:
            group = row.group
            table.add_section()
            table.add_row(f"[bold]{escape(group)}[/bold]", *[""] * len(models))
        note = f" [dim]({escape(row.note)})[/dim]" if row.note else ""
        table.add_row(f"  {escape(row.title)}{note}", *map(escape, row.cells))
    parts: list[Any] = [table]
    for model in models:
        parts.append(Text(f"\n{model.name}", style="bold"))
        held = model.header.get("probes_hold_bytes")
        if held:
            parts.append(
                Text(f"  the probes held at most {held / 2**20:,.0f} MiB beside the model")
            )
        for gap in model.notes:
            parts.append(Text(f"  not measured: {gap['part']}: {gap['reason']}"))
        parts += [Text(f"  {channel_in_words(line)}") for line in model.channels[:5]]
        if not model.advice:
            parts.append(Text("  no number here supports advice"))
        parts += [Text(f"  {advice_in_words(line)}") for line in model.advice]
    return Group(*parts)


def channel_in_words(line: dict[str, Any]) -> str:
    """One outlier channel, in a sentence."""
    return (
        f"channel {line['channel']}: up to {style.number(line['largest'])} "
        f"({style.number(line['medians'])} × the median) after {layer_in_words(line['layer'])}, "
        f"in {'the first token' if line['tokens'] == 'first' else 'tokens after the first'}; "
        f"an outlier from {layer_in_words(line['first_layer'])} on"
    )


def layer_in_words(layer: int) -> str:
    """layer 3; the embeddings stand before layer 0."""
    return "the embeddings" if layer < 0 else f"layer {layer}"


def advice_in_words(line: dict[str, Any]) -> str:
    """A finding, its advice and the number it rests on."""
    return f"{line['finding']}: {line['advice']} [{support_in_words(line)}]"


def support_in_words(line: dict[str, Any]) -> str:
    """The number that a piece of advice rests on, and the threshold that it passed."""
    side = "at most" if line["value"] <= line["threshold"] else "at least"
    return f"{line['metric']} {style.number(line['value'])}: {side} {line['threshold']:g}"


def to_html(models: Sequence[Diagnosed], looks: dict[str, style.Look]) -> str:
    """The table as an HTML fragment; every text of the records is escaped."""
    from clearhead.report.tables import swatch

    heads = "".join(
        f'<th scope="col">{swatch(looks[model.name])}'
        f'<span class="name" title="{html.escape(model.name)}">{html.escape(model.name)}</span>'
        "</th>"
        for model in models
    )
    body, group = "", ""
    for row in rows(models):
        if row.group != group:
            group = row.group
            body += (
                f'<tr><th class="group" colspan="{len(models) + 1}" scope="rowgroup">'
                f"{html.escape(group)}</th></tr>"
            )
        note = f'<span class="unit">{html.escape(row.note)}</span>' if row.note else ""
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells)
        body += f'<tr><th scope="row">{html.escape(row.title)}{note}</th>{cells}</tr>'
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Diagnosis">'
        f'<table class="diagnosis"><thead><tr><th scope="col"></th>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
