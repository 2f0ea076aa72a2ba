"""The demo's page: defects in words and figures first, longer records folded beside them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from clearhead.records.runs import Records
from clearhead.report import comparison, evaluation, figures, made, narrative, style
from clearhead.report import demo_verdict as said
from clearhead.report.demo_verdict import (
    ALIBI,
    BASE,
    COARSE,
    COCA,
    LONGER,
    MASS,
    SHAPED,
    Parts,
    added,
    by_model,
    only,
)
from clearhead.report.diagnosis import outlier
from clearhead.report.heatmaps import SHARE
from clearhead.report.page import Fold, Page, Panel, Panels, Section, section
from clearhead.report.pivots import (
    Entry,
    Heading,
    Pivot,
    Quantity,
    at,
    build,
    by_arm,
    in_header,
    seeds_in_words,
)

TITLE = "Defects of the Transformer, and what repairs them"


def page(parts: Parts) -> Page:
    """The page of the demo."""
    built = Page(
        title=TITLE,
        kicker="clearhead demo",
        records=parts.all,
        judge=lambda threshold: said.verdict(parts),
        warnings=narrative.warnings(parts.text),
    )
    return built.with_sections(
        _lengths(parts, built),
        _blocks(parts, built),
        _sinks(parts),
        _bits(parts),
        made.section(parts.all),
    )


# --- texts longer than in training


def _lengths(parts: Parts, built: Page) -> Section | None:
    shown = only(parts.text, BASE, ALIBI, COCA)
    return section(
        "demo.lengths",
        said.lengths(parts.text),
        (
            _panels(figures.perplexity_by_length(shown, built.looks)),
            by_arm(shown, "perplexity by length", _by_length(shown)),
            _beside(parts, "passkey.jsonl", "share of hidden numbers found", _passkeys),
        ),
    )


def _by_length(records: Records) -> Iterator[tuple[Heading, Quantity]]:
    for length in records.dimension("perplexity", "length", task=None):
        yield (
            Heading(title=f"{length:,}", note="tokens"),
            Quantity(read=at("perplexity", length=length)),
        )


def _passkeys(records: Records) -> Pivot | None:
    """Shares of hidden numbers that are found, without a scaling of the positions."""
    plain = Records(
        runs=tuple(
            replace(
                run,
                measures={
                    key: one
                    for key, one in run.measures.items()
                    if one.dimensions.get("scaling") == evaluation.PLAIN
                },
            )
            for run in records.runs
        )
    )
    return evaluation.table(plain, "passkey", "accuracy")


# --- fewer parts


def _blocks(parts: Parts, built: Page) -> Section | None:
    shown = only(parts.text, BASE, SHAPED)
    trained = parts.text.sequence_length()
    columns = [
        (
            Heading(title="parameters", note="M"),
            Quantity(read=in_header("parameters"), scale=1e-6, judged=False, write=style.number),
        ),
        (Heading(title="perplexity"), Quantity(read=at("perplexity", length=trained))),
    ]
    return section(
        "demo.blocks",
        said.blocks(parts.text),
        (
            _panels(figures.loss(shown, built.looks, "tokens")),
            by_arm(shown, "blocks", columns),
            _beside(
                parts,
                "blocks.jsonl",
                "perplexity",
                lambda records: by_arm(records, "blocks", _by_length(records)),
            ),
        ),
    )


# --- the sink


def _sinks(parts: Parts) -> Section | None:
    columns = [
        (Heading(title="weight on the first token"), _share(MASS)),
        (Heading(title="weight on no token"), _share("null_mass")),
        (Heading(title="largest weight on the first token", note="of all queries"), _share(SHARE)),
        (
            Heading(title="perplexity"),
            Quantity(read=at("perplexity", length=parts.sinks.sequence_length())),
        ),
    ]
    return section(
        "demo.sinks",
        said.sinks(parts.sinks),
        (
            *comparison.maps(parts.sinks),
            by_arm(parts.sinks, "the sink", columns),
            _beside(
                parts,
                "backcopy-diagnoses.jsonl",
                "attention to the first token",
                lambda records: by_arm(records, "the sink", columns[:-1]),
            ),
        ),
    )


def _share(metric: str) -> Quantity:
    return Quantity(read=at(metric, map="softmax"), write=style.percent)


# --- outliers and 8 bits


def _bits(parts: Parts) -> Section | None:
    columns = [
        (Heading(title="first token a sink", note="of all queries"), _share(SHARE)),
        (Heading(title="largest hidden number", note="in medians"), Quantity(read=outlier)),
        (Heading(title="perplexity", note="full precision"), Quantity(read=at("perplexity"))),
        (
            Heading(title="in 8 bits", note="a scale a tensor"),
            Quantity(read=at("perplexity", scheme=COARSE)),
        ),
        (Heading(title="change"), Quantity(read=added, write=style.percent)),
    ]
    models = by_model(parts)
    rows = [
        (Heading(title=arm, arm=arm, note=label.partition(":")[0] or "this run"), studies)
        for (arm, label), studies in models.items()
    ]

    def fill(studies: list[Records], quantity: Quantity) -> tuple[Entry, ...]:
        cells = (quantity.entries(one, one.arms()[0], one.arms()[0]) for one in studies)
        return next(filter(None, cells), ())

    return section(
        "demo.bits",
        said.bits(parts),
        (
            build("outliers and 8 bits", rows, columns, fill, corner="model"),
            _beside(parts, "orthoadam.jsonl", "outliers of two optimizers", _kurtosis),
        ),
    )


def _kurtosis(records: Records) -> Pivot | None:
    columns = [
        (Heading(title=f"kurtosis, {title}", note="3 is a bell curve"), Quantity(read=read))
        for title, read in (
            ("first token", at("kurtosis", tokens="first")),
            ("other tokens", at("kurtosis", tokens="rest")),
        )
    ]
    length = records.sequence_length()
    columns.append((Heading(title="perplexity"), Quantity(read=at("perplexity", length=length))))
    return by_arm(records, "outliers", columns)


# --- blocks of sections


def _panels(panel: Panel | None) -> Panels | None:
    if panel is None:
        return None
    panel.own_legend = True  # its few models, not those of the whole page
    return Panels(panels=(panel,))


def _beside(
    parts: Parts, name: str, what: str, make: Callable[[Records], Pivot | None]
) -> Fold | None:
    """A longer record, folded."""
    records = parts.beside(name)
    table = make(records) if records.runs else None
    if table is None:
        return None
    seeds = seeds_in_words(max(len(records.of(arm)) for arm in records.arms()))
    return Fold(
        summary=f"A longer record beside it: {what} ({LONGER[name][0]}, {seeds})", pivot=table
    )
