"""The sections of a page: each puts the same quantity of every set of records side by side."""

import html
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from clearhead.report import (
    evaluation_page,
    figures,
    heatmaps,
    made,
    milestones,
    narrative,
    style,
    tables,
    verdicts,
)
from clearhead.report.contrasts import Contrasts, compare_all
from clearhead.report.records import Records

if TYPE_CHECKING:
    import plotly.graph_objects as go


# Arms that a figure's own legend has room for; more are told apart once, above the figures.
LEGEND = 4


@dataclass(kw_only=True)
class Page:
    """What a page is made of: one set of records a label, the looks they share, and what the script
    of the page draws (`figures` by the id of their element, `attention` the packed maps)."""

    records: Records
    looks: dict[str, style.Look]
    figures: dict[str, Any] = field(default_factory=dict)
    attention: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> bool:
        """Whether arms are told apart once for all figures, instead of by a legend in each."""
        return len(self.looks) > LEGEND

    def key_list(self) -> str:
        """Which colour and symbol is which arm, where figures have no legend of their own."""
        if not self.key:
            return ""
        items = "".join(
            f'<li><i style="--light:{look.colour};--dark:{look.dark}">{look.glyph}</i> '
            f"{html.escape(arm)}</li>"
            for arm, look in self.looks.items()
        )
        return f'<ul class="key">{items}</ul>'

    @cached_property
    def contrasts(self) -> Contrasts:
        """All comparisons of the page."""
        return compare_all(self.records)

    def tables_of(self, found: dict[str, tables.Table]) -> str:
        """Tables by label as HTML, each under the mark of its set of records."""
        return "".join(
            _tag(label, records)
            + tables.to_html(found[label], self.looks, self.contrasts.threshold)
            for label, records in self.sets()
            if label in found
        )

    def sets(self) -> Iterable[tuple[str, Records]]:
        return [(label, self.records.labelled(label)) for label in self.records.labels()]

    def place(
        self, figure: "go.Figure", description: str, shape: str, *, own_legend: bool = False
    ) -> str:
        """Take up a figure; returns the element that will hold it."""
        name = f"figure-{len(self.figures) + 1}"
        self.figures[name] = {**json.loads(figure.to_json()), "ownLegend": own_legend}
        return (
            f'<div class="plot {shape}" id="{name}" role="img" '
            f'aria-label="{html.escape(description)}"></div>'
        )


def build(page: Page) -> str:
    """All sections that the records can fill."""
    makers: tuple[Callable[[Page], str], ...] = (
        _comparison,
        _training,
        _equal_loss,
        _lengths,
        _attention,
        _first_token,
        _layers,
        evaluation_page.section,
        _provenance,
    )
    return "\n".join(filter(None, (maker(page) for maker in makers)))


def _section(name: str, title: str, caption: str, content: str) -> str:
    return (
        f'<section id="{name}"><h2>{html.escape(title)}</h2>'
        f'<p class="caption">{html.escape(caption)}</p>{content}</section>'
    )


def _tag(label: str, records: Records) -> str:
    """The mark that says which set of records something shows."""
    amounts = sorted({narrative.budget(run) or 0.0 for run in records.runs})
    facts = []
    if amounts and amounts[-1]:
        facts.append(f"{style.count(amounts[-1])} tokens a model")
    seeds = max((len(records.of(arm)) for arm in records.arms()), default=0)
    facts.append(tables.seeds_in_words(seeds))
    kind = "committed" if label else "now"
    return (
        f'<p class="tag {kind}"><b>{html.escape(narrative.record_name(label))}</b> '
        f"<span>{html.escape(' · '.join(facts))}</span></p>"
    )


def framed(page: Page, tag: str, panel: figures.Panel, shape: str, of: str = "") -> str:
    """A panel as HTML: its title, `tag` (HTML), the place of the figure, its note."""
    plot = page.place(panel.figure, of + panel.title, shape, own_legend=panel.own_legend)
    note = f"<figcaption>{html.escape(panel.note)}</figcaption>" if panel.note else ""
    return f'<figure class="panel"><h3>{html.escape(panel.title)}</h3>{tag}{plot}{note}</figure>'


def _side_by_side(page: Page, makers: Iterable[Callable[[Records], figures.Panel | None]]) -> str:
    """A row for each kind of figure, in it one panel a set of records."""
    cells = []
    for maker in makers:
        for label, records in page.sets():
            panel = maker(records)
            if panel is not None:
                cells.append(framed(page, _tag(label, records), panel, "curve"))
    return f'{page.key_list()}<div class="pair">{"".join(cells)}</div>' if cells else ""


def _comparison(page: Page) -> str:
    content = page.tables_of(page.contrasts.arms)
    if not content:
        return ""  # evaluations alone: their tables stand below
    return _section(
        "comparison",
        "The comparison",
        f"{verdicts.CAPTION} {page.contrasts.account}",
        content,
    )


def _training(page: Page) -> str:
    content = _side_by_side(
        page,
        (
            lambda records: figures.loss(records, page.looks, "tokens"),
            lambda records: figures.loss(records, page.looks, "seconds"),
        ),
    )
    return content and _section(
        "training",
        "Learning",
        "Lower is better: the loss is the surprise at the next token. By tokens, a lower curve "
        "learns more from the same text; by time, it also pays for its own cost a step.",
        content,
    )


def _equal_loss(page: Page) -> str:
    def maker(quantity: milestones.Quantity) -> Callable[[Records], figures.Panel | None]:
        return lambda records: milestones.against_loss(records, page.looks, quantity)

    content = page.tables_of(page.contrasts.equal_loss)
    content += _side_by_side(page, map(maker, milestones.QUANTITIES))
    return content and _section(
        "equal-loss",
        "Outliers at equal loss",
        "Outliers grow as a model learns, so one that learns faster has them sooner. The table "
        "puts each model beside the first one where both were equally good; the figures follow "
        "them through training, each against its own validation loss.",
        content,
    )


def _lengths(page: Page) -> str:
    content = _side_by_side(
        page, (lambda records: figures.perplexity_by_length(records, page.looks),)
    )
    apart = any(run.header.get("documents") == "apart" for run in page.records.runs)
    return content and _section(
        "lengths",
        "Texts longer than in training",
        "Perplexity is the number of equally likely next tokens that would surprise as much. A "
        "line that stays flat or falls to the right of the mark copes with texts longer than it "
        "was trained on; one that rises does not."
        + " Documents were kept apart, as in training: a longer window is a longer text only where "
        "documents are as long." * apart,
        content,
    )


def _attention(page: Page) -> str:
    content = "".join(
        _tag(label, records) + grid
        for label, records in page.sets()
        if (grid := _attention_grid(page, records))
    )
    if not content:
        return ""
    layers = sorted({layer for one in page.attention for layer in one["layers"]})
    heads = max(len(one["heads"]) for one in page.attention)
    middle = layers[len(layers) // 2]
    options = "".join(
        f'<option value="{layer}"{" selected" if layer == middle else ""}>{layer}</option>'
        for layer in layers
    )
    choice = (
        f'<form class="choice"><label>Layer <select id="layer">{options}</select></label>'
        '<label>Head <select id="head">'
        + "".join(f'<option value="{head}">{head}</option>' for head in range(heads))
        + "</select></label></form>"
    )
    return _section(
        "attention",
        "Where attention goes",
        "All models read the same text. A row is a token that attends, a column a token attended "
        "to; a strong first column is attention parked on the first token. Differential attention "
        "subtracts its second map from its first: weight that both maps share cancels, and what "
        "remains can be negative. Where a model has fewer heads, the one at the same place is "
        "shown.",
        choice + _legends(page) + content,
    )


def _legends(page: Page) -> str:
    legends = _legend("weight", style.SEQUENTIAL, ("0", "0.06", "0.25", "0.56", "1"))
    if any(one["signed"] for one in page.attention):
        legends += _legend(
            "signed difference, centred at 0", style.DIVERGING, ("−1", "−0.25", "0", "0.25", "1")
        )
    note = '<p class="note">Colour steps follow the square root of the weight.</p>'
    return f'<div class="legends">{legends}{note}</div>'


def _legend(name: str, stops: tuple[tuple[str, str], ...], ticks: tuple[str, ...]) -> str:
    light, dark = (", ".join(colours) for colours in zip(*stops, strict=True))
    marks = "".join(f"<span>{html.escape(tick)}</span>" for tick in ticks)
    return (
        f'<div class="legend" style="--light:linear-gradient(to right, {light});'
        f'--dark:linear-gradient(to right, {dark})"><b>{html.escape(name)}</b>'
        f"<i></i><div>{marks}</div></div>"
    )


def _attention_grid(page: Page, records: Records) -> str:
    cells = []
    for panel in heatmaps.attention(records):
        places = [tuple(map(int, key.split("."))) for key in panel.maps]
        plot = page.place(panel.figure, f"attention map of {panel.title}", "map")
        page.attention.append(
            {
                "figure": next(reversed(page.figures)),
                "signed": panel.signed,
                "causal": panel.causal,
                "tokens": panel.tokens,
                "maps": panel.maps,
                "layers": sorted({layer for layer, _ in places}),
                "heads": sorted({head for _, head in places}),
            }
        )
        cells.append(
            f'<figure class="panel"><h3>{html.escape(panel.title)}</h3>'
            f'<p class="which" aria-live="polite"></p>{plot}</figure>'
        )
    return f'<div class="maps">{"".join(cells)}</div>' if cells else ""


def _first_token(page: Page) -> str:
    largest = heatmaps.largest_share(page.records)
    content = ""
    for label, records in page.sets():
        panels = heatmaps.first_token_share(records, largest)
        if not panels:
            continue
        floor = tables.chance_floor(records)
        chance = "" if floor is None else f"Chance: {style.percent(floor)}. "
        seeds = sorted({records.of(arm)[0].seed for arm in records.arms()})
        which = f"Seed {', '.join(map(str, seeds))}." if seeds else ""
        of = "first token’s share in "
        cells = "".join(framed(page, "", panel, "cells", of) for panel in panels)
        note = html.escape(chance + which)
        content += (
            _tag(label, records)
            + f'<p class="note">{note}</p><div class="maps small">{cells}</div>'
        )
    if not content:
        return ""
    ticks = tuple(f"{100 * largest * part:.0f} %" for part in (0, 0.5, 1))
    legend = _legend("share of queries", style.SEQUENTIAL, ticks)
    return _section(
        "first-token",
        "The first token’s share, head by head",
        "For how many queries (in %) the first token gets the largest weight of all. Heads far "
        "above chance use it as a sink: a place to put attention when there is nothing to attend "
        "to. One colour scale serves all models.",
        f'<div class="legends">{legend}</div>{content}',
    )


def _layers(page: Page) -> str:
    content = _side_by_side(
        page,
        (
            lambda records: figures.by_layer(records, page.looks, "kurtosis"),
            lambda records: figures.by_layer(records, page.looks, "kurtosis_rotated"),
            lambda records: figures.by_layer(records, page.looks, "largest_activation"),
        ),
    )
    return content and _section(
        "layers",
        "Outliers in the hidden states",
        "Kurtosis says how far single channels stand out (3 is a bell curve); the largest "
        "activation says how large they get. Lines that climb above the others, mostly for the "
        "first token, are outliers that make a model hard to quantise. In OrthoAdam’s basis means "
        "after its random rotation, the same for every model of a seed: outliers that an "
        "optimizer only moved would show there.",
        content,
    )


def _provenance(page: Page) -> str:
    content = "".join(
        f'<div class="made">{_tag(label, records)}{made.facts(records)}</div>'
        for label, records in page.sets()
    )
    return _section(
        "made",
        "How this was made",
        "Everything needed to run it again; every number here comes from these runs’ records.",
        content,
    )
