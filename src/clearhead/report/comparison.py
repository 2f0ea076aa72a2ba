"""The page of a comparison: cost and perplexity first, what models do inside folded below."""

from collections.abc import Iterator
from functools import partial

from clearhead.records.runs import Records
from clearhead.report import (
    evaluation,
    figures,
    made,
    narrative,
    quantization,
    style,
)
from clearhead.report.costs import add_costs, four_digits
from clearhead.report.milestones import at_equal_loss
from clearhead.report.narrative import Maker
from clearhead.report.page import Page, Section, section
from clearhead.report.pivots import Pivot
from clearhead.report.quantities import Quantity, by_arm

_FIRST_TOKEN = "First token’s attention"
CAPTION = (
    "Mean ± standard deviation over seeds; below it the difference to the first row where its 95 % "
    "interval (Welch’s t) excludes zero, “alone” where it does not hold among all comparisons of "
    "the page, else “undecided” with the smallest effect that these seeds could have decided. "
    "Hardly learnt is a perplexity above the square root of the vocabulary: what mechanisms do in "
    "trained models may not show yet. At the edge is the lowest or highest rate of those tried."
)
LEARNING = (
    "By tokens, a lower curve learns more from the same text; by time, it also pays for its own "
    "cost a step."
)
LENGTHS = (
    "A line that stays flat or falls to the right of the mark copes with texts longer than it was "
    "trained on."
)
APART = (
    " Documents were kept apart, as in training: a longer window is a longer text only where "
    "documents are as long."
)
EQUAL = (
    "Outliers grow as a model learns, so each model stands beside the first one where both had the "
    "same validation loss."
)


def page(records: Records, title: str) -> Page:
    """The page of trained or evaluated models, with the sections that the records can fill."""
    trained = not narrative.only_evaluated(records)

    def judge(threshold: float) -> list[str]:
        said = narrative.lead(records, threshold) if trained or not records.runs else []
        return [one for one in said or [evaluation.verdict(records)] if one] or [
            f"The tables show what was measured of {narrative.title_of(records)}."
        ]

    built = Page(
        title=title,
        kicker="clearhead report",
        records=records,
        judge=judge,
    )
    looks = built.looks
    apart = any(run.header.get("documents") == "apart" for run in records.runs)
    sink = narrative.answer(
        records,
        "Queries that look most at the first token",
        Quantity("", metric="sink", write=style.percent),
        more=chance(records),
    )

    def show(
        name: str, title: str, caption: str, *makers: Maker, answer: str = "", folded: bool = False
    ) -> Section | None:
        blocks = narrative.each(records, *makers)
        return section(name, answer, blocks, title=title, caption=caption, folded=folded)

    return built.with_sections(
        show("comparison", "The comparison", CAPTION, comparison) if trained else None,
        show(
            *("training", "Learning", LEARNING),
            lambda mine: figures.loss(mine, looks, "tokens"),
            lambda mine: figures.loss(mine, looks, "seconds"),
        ),
        show(
            *("lengths", "Texts longer than in training", LENGTHS + APART * apart),
            lambda mine: figures.perplexity_by_length(mine, looks),
        ),
        *evaluation.sections(records, looks),
        show("bits", "What few bits cost", quantization.COSTS, _bits)
        if quantization.schemes(records)
        else None,
        show("internals", "Inside the models", "", internals, answer=sink, folded=True),
        show("equal-loss", "Outliers at equal loss", EQUAL, at_equal_loss, folded=True),
        made.section(records) if records.runs else None,
    )


def chance(records: Records) -> str:
    """`; chance 1.3 %`, where records have it."""
    floor = narrative.chance_floor(records)
    return f"; chance {style.percent(floor)}" if floor else ""


def comparison(records: Records) -> Pivot | None:
    """Size, perplexity and cost of each arm, over the runs of one label."""
    return by_arm(records, "comparison", _outside(records))


def _outside(records: Records) -> Iterator[Quantity]:
    millions = partial(
        Quantity, group="Parameters", note="M", scale=1e-6, judged=False, write=four_digits
    )
    yield millions("all", metric="parameters")
    yield millions("without embeddings", metric="non_embedding_parameters")
    group = "Validation perplexity by length of text"
    yield Quantity("overall", group, metric="perplexity")
    trained = records.sequence_length()
    for metric, heading, unit in (
        ("perplexity", group, ""),
        ("masked loss", "Validation loss at hidden tokens", "nats; "),
    ):
        for length in records.dimension(metric, "length", task=None):
            title = f"{length / trained:g} ×" if trained else f"{length:,}"
            note = f"{unit}{length:,} tokens" if trained else unit.removesuffix("; ")
            yield Quantity(title, heading, note, metric=metric, at={"length": length})
    splits = dict.fromkeys(
        (one.metric, one.dimensions["split"])
        for run in records.runs
        if "task" in run.header  # a fine-tuned classifier
        for one in run.measures.values()
        if "split" in one.dimensions
    )
    for metric, split in splits:
        yield Quantity(metric, "Classification", split, metric=metric, at={"split": split})
    cost = partial(Quantity, group="Cost", one_device=True)
    yield cost("training speed", note="tokens/s", metric="tokens_per_second")
    yield cost("peak memory", note="MiB", metric="peak_memory_bytes", scale=2.0**-20)


def internals(records: Records) -> Pivot | None:
    """Attention to the first token and outliers of each arm, over the runs of one label."""
    return by_arm(records, "inside the models", _inside(records))


def _inside(records: Records) -> Iterator[Quantity]:
    for metric, title, note in (
        ("first_token_argmax_share", "argmax share", f"% of query–head pairs{chance(records)}"),
        ("first_token_mass", "mean mass", "%"),
        ("null_mass", "mass on no token", "%"),
        ("prefix_mass", "mass on learned keys", "%"),
    ):
        yield Quantity(title, _FIRST_TOKEN, note, metric=metric, by_map=True, scale=100)
    for metric, group in (
        ("kurtosis", "Kurtosis of hidden states"),
        ("kurtosis_rotated", "Kurtosis in OrthoAdam’s basis"),
        ("largest_activation", "Largest activation"),
    ):
        for tokens, title in (("first", "first token"), ("rest", "other tokens")):
            yield Quantity(title, group, metric=metric, at={"tokens": tokens})


def _bits(records: Records) -> Pivot | None:
    for run in records.runs:
        add_costs(run)
    return quantization.results(records)
