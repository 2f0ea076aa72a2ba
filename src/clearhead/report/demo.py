"""The demo's page: a sentence and a section a defect, longer records folded beside."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from clearhead.records.runs import Measure, Records, Run
from clearhead.report import comparison, evaluation, figures, made, narrative, style
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
from clearhead.report.statistics import LEVEL

TITLE = "Defects of the Transformer, and what repairs them"
LEAD = (
    "What the standard Transformer gets wrong, and what each repair does to it, in small models "
    "that train in minutes."
)
COARSE = "w8a8-coarse"  # 8 bits, a scale a tensor
MASS = "first_token_mass"
BASE, SHAPED, ALIBI, COCA = "transformer", "sas-p", "alibi", "coca"
# File in results/ → what it is called on the page, and the models shown of it.
LONGER: dict[str, tuple[str, tuple[str, ...]]] = {
    "passkey.jsonl": ("passkeys, 1.5 M tokens a model", (BASE, ALIBI, COCA)),
    "blocks.jsonl": ("8.2 M tokens a model, rates tuned", (BASE, SHAPED)),
    "backcopy-diagnoses.jsonl": ("the same made text, 4.1 M tokens a model", (BASE, "softmax1")),
    "orthoadam.jsonl": (
        "OrthoAdam with one rotation a size, 2 M tokens a model",
        ("transformer · adamw", "transformer · orthoadam"),
    ),
    "smollm2-diagnosis.jsonl": ("SmolLM2-135M, measured before", ()),
    "smollm2-bits.jsonl": ("SmolLM2-135M, measured before", ()),
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The records of the demo: this run's by part, and longer ones by file."""

    text: Records
    sinks: Records
    bits: Records
    pretrained: tuple[Records, ...] = ()
    longer: Mapping[str, Records] = field(default_factory=dict)

    def beside(self, name: str) -> Records:
        """The runs of a longer record that the page shows, under its name."""
        label, arms = LONGER[name]
        runs = self.longer[name].runs if name in self.longer else ()
        return Records(
            runs=tuple(
                replace(run, label=f"longer record: {label}")
                for run in runs
                if run.arm in arms or not arms
            )
        )

    @property
    def all(self) -> Records:
        """Every run that the page shows."""
        records = (self.text, self.sinks, self.bits, *self.pretrained, *map(self.beside, LONGER))
        return Records(runs=tuple(run for one in records for run in one.runs))


def only(records: Records, *arms: str) -> Records:
    """The runs of these arms."""
    return Records(runs=tuple(run for run in records.runs if run.arm in arms))


def by_model(parts: Parts) -> dict[tuple[str, str], list[Records]]:
    """The diagnosis and the quantisation of each model, by name and label."""
    longer = [parts.beside(f"smollm2-{study}.jsonl") for study in ("diagnosis", "bits")]
    found: dict[tuple[str, str], list[Records]] = {}
    for records in (parts.bits, *parts.pretrained, *longer):
        for place in dict.fromkeys((run.arm, run.label) for run in records.runs):
            found.setdefault(place, []).append(only(records, place[0]))
    return found


def added(run: Run) -> list[Measure]:
    """The share that 8 bits add to perplexity."""
    full, coarse = run.value("perplexity"), run.value("perplexity", scheme=COARSE)
    if full is None or coarse is None:
        return []
    return [Measure(metric="added", value=coarse / full - 1)]


def page(parts: Parts) -> Page:
    """The page of the demo."""
    built = Page(
        title=TITLE,
        kicker="clearhead demo",
        records=parts.all,
        judge=lambda threshold: [LEAD, *filter(None, answers)],
        warnings=narrative.warnings(parts.text),
    )
    made_of = (_lengths(parts, built), _blocks(parts, built), _sinks(parts), _bits(parts))
    sections = [one for one in made_of if one is not None]
    answers = [one.answer for one in sections]
    shown = (replace(one, answer="") for one in sections)
    return built.with_sections(*shown, made.section(parts.all))


# --- texts longer than in training


def _lengths(parts: Parts, built: Page) -> Section | None:
    shown = only(parts.text, BASE, ALIBI, COCA)
    longest = max(shown.dimension("perplexity", "length", task=None), default=0)
    trained = shown.sequence_length() or 0
    what = f"Perplexity at {longest:,} tokens, after training at {trained:,},"
    return section(
        "demo.lengths",
        _beside_base(shown, what, "perplexity", ("better", "worse"), length=longest),
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
        _beside_base(shown, "Perplexity", "perplexity", ("better", "worse"), length=trained),
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
        _beside_base(
            parts.sinks,
            "Weight on the first token",
            MASS,
            ("less", "more"),
            write=style.percent,
            map="softmax",
        ),
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
        "",
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


# --- sentences and blocks of sections


def _beside_base(
    records: Records,
    what: str,
    metric: str,
    words: tuple[str, str],
    write: Callable[[float], str] = style.number,
    **dimensions: int | str | None,
) -> str:
    """Each model's number beside the baseline's, judged among these alone."""
    return narrative.beside(records, LEVEL, what, metric, write=write, words=words, **dimensions)


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
