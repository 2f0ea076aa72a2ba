"""The page of a comparison: cost and perplexity first, what models do inside folded below."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from clearhead.errors import ClearheadError
from clearhead.records.runs import DIAGNOSIS, QUANTIZATION, Measure, Records, Run
from clearhead.report import charts, diagnosis, evaluation, narrative, quantization, style
from clearhead.report.costs import add_costs
from clearhead.report.page import Page, section
from clearhead.report.pivots import (
    SHARE,
    Entry,
    Pivot,
    Quantity,
    arm_headings,
    build,
    by_arm,
    entry,
)

CAPTION = (
    "Mean ± standard deviation over seeds; below it the difference to the first row where its 95 % "
    "interval (Welch’s t) excludes zero, “alone” where it does not hold among all comparisons of "
    "the page, else “undecided” with the smallest effect that these seeds could have decided. "
    "Hardly learnt is a perplexity above the square root of the vocabulary: what mechanisms do in "
    "trained models may not show yet. At the edge is the lowest or highest rate of those tried."
)
LEARNING = "A lower curve learns more from the same text."
LENGTHS = (
    "A line that stays flat or falls to the right of the mark copes with texts longer than it was "
    "trained on."
)
APART = (
    " Documents were kept apart, as in training: a longer window is a longer text only where "
    "documents are as long."
)
EQUAL = (
    "Outliers grow as a model learns, and an optimizer that learns faster has them sooner: each "
    "model stands beside the first one where both had the same validation loss."
)
LEAD = (
    ("Validation perplexity", Quantity("", metric="trained perplexity")),
    (
        "Training speed in tokens/s",
        Quantity("", metric="tokens_per_second", write=style.count, one_device=True),
    ),
)

LOSS = Quantity("compared at", "Loss", "nats per token", metric="loss")
OUTLIERS = [
    Quantity("", f"{title}, {words}", metric=metric, at={"tokens": tokens})
    for metric, title in (
        ("kurtosis", "Kurtosis"),
        ("kurtosis_rotated", "Kurtosis in OrthoAdam’s basis"),
        ("largest_activation", "Largest activation"),
    )
    for tokens, words in (("first", "first token"), ("rest", "other tokens"))
]
ARGMAX = Quantity(
    "", "First token’s argmax share", "% of query–head pairs", metric=SHARE, scale=100.0
)


def page_of(records: Records, title: str = "") -> Page:
    """The page of records of one study.

    Args:
        title: unless given, the models' names.

    Raises:
        ClearheadError: records of several studies, or of a quantisation without full precision.
    """
    studies = list(dict.fromkeys(run.study for run in records.runs))
    if len(studies) > 1:
        raise ClearheadError(
            "records of runs, of diagnoses and of quantisations do not share a page: give each "
            f"kind by itself; found {' and '.join(studies)}"
        )
    pages = {DIAGNOSIS: diagnosis.page, QUANTIZATION: quantization.page}
    make = pages.get(studies[0], page) if studies else page
    return make(records, title or narrative.title_of(records))


def page(records: Records, title: str) -> Page:
    """The page of trained or evaluated models, with the sections that the records can fill."""
    built = Page(
        title=title,
        kicker="clearhead report",
        records=records,
        judge=lambda threshold: _verdict(records, threshold),
    )
    looks = built.looks
    trained, each = _were_trained(records), partial(narrative.each, records)
    apart = any(run.header.get("documents") == "apart" for run in records.runs)
    sink = narrative.answer(
        records,
        "Queries that look most at the first token",
        Quantity("", metric="sink", write=style.percent),
        more=narrative.chance(records),
    )
    losses = partial(charts.loss, looks=looks)
    lengths = partial(charts.perplexity_by_length, looks=looks)
    bits = each(_bits) if quantization.schemes(records) else ()
    return built.with_sections(
        section("comparison", "The comparison", each(comparison), CAPTION) if trained else None,
        section("training", "Learning", each(losses), LEARNING),
        section("lengths", "Texts longer than in training", each(lengths), LENGTHS + APART * apart),
        *evaluation.sections(records, looks),
        section("bits", "What few bits cost", bits, quantization.COSTS),
        section("internals", "Inside the models", each(internals), answer=sink, folded=True),
        section(
            "equal-loss", "Outliers at equal loss", each(at_equal_loss), caption=EQUAL, folded=True
        ),
        narrative.provenance(records) if records.runs else None,
    )


def _verdict(records: Records, threshold: float) -> list[str]:
    """Perplexity and speed of trained models, else the numbers of the first tasks."""
    if not records.runs:
        return ["There are no records yet."]
    lead = (narrative.answer(records, *one, threshold=threshold) for one in LEAD)
    said = [one for one in lead if one] if _were_trained(records) else []
    if not said:
        said = [one for one in evaluation.verdict(records, threshold) if one]
    return said or [f"The tables show what was measured of {narrative.title_of(records)}."]


def _were_trained(records: Records) -> bool:
    """True if a run was trained in these records: `clearhead eval` takes models from anywhere."""
    return any(
        run.steps or any("task" not in one.dimensions for one in run.measures.values())
        for run in records.runs
    )


def comparison(records: Records) -> Pivot | None:
    """Size, perplexity and cost of each arm, over the runs of one label."""
    return by_arm(records, "comparison", _outside(records))


def _outside(records: Records) -> Iterator[Quantity]:
    millions = partial(
        Quantity, group="Parameters", note="M", scale=1e-6, judged=False, write=style.four_digits
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
    of_pairs = f"% of query–head pairs{narrative.chance(records)}"
    attention = partial(Quantity, group="First token’s attention", by_map=True, scale=100)
    yield attention("argmax share", note=of_pairs, metric="first_token_argmax_share")
    yield attention("mean mass", note="%", metric="first_token_mass")
    yield attention("mass on no token", note="%", metric="null_mass")
    yield attention("mass on learned keys", note="%", metric="prefix_mass")
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


def at_equal_loss(records: Records) -> Pivot | None:
    """Each arm beside the reference where both had the same validation loss.

    Seed by seed that is the higher of the two lowest losses; values between two measurements are
    interpolated. A seed counts only where both models were measured before and after.
    """
    reference, *_ = records.arms() or [""]
    others = {run.seed: run for run in records.of(reference)}
    maps = records.dimension(SHARE, "map", reference)[:1]
    columns = [(LOSS, False)]
    for one in (*OUTLIERS, *(replace(ARGMAX, at={"map": name}) for name in maps)):
        columns += [
            (replace(one, title="this model"), True),
            (replace(one, title=reference), False),
        ]

    def fill(arm: str, what: tuple[Quantity, bool]) -> tuple[Entry, ...]:
        number, own = what
        pairs = [(run, others[run.seed]) for run in records.of(arm) if run.seed in others]
        values = {run.seed: _at_equal_loss(run, other, number) for run, other in pairs}
        mine, theirs = (
            {seed: [Measure(metric="", value=ones[side])] for seed, ones in values.items() if ones}
            for side in (0, 1)
        )
        sides = (mine, theirs) if own else (theirs, {})
        return (entry(*sides, reference=reference, scale=number.scale),) if mine else ()

    title = f"at equal loss, beside {reference}"
    named = [(number, (number, own)) for number, own in columns]
    return build(title, arm_headings(records)[1:], named, fill, corner="model")


def _at_equal_loss(run: Run, other: Run, number: Quantity) -> tuple[float, ...]:
    """The number of both runs where they had the same loss; none where one was not measured before
    and after."""
    runs = (run, other)
    losses = [dict(_steps(one, LOSS)) for one in runs]
    if not all(losses):
        return ()
    equal = max(min(one.values()) for one in losses)
    if number is LOSS:
        return equal, equal
    curves = (
        [(known[step], value) for step, value in _steps(one, number) if step in known]
        for one, known in zip(runs, losses, strict=True)
    )
    mine, theirs = (_where_reached(curve, equal) for curve in curves)
    return () if mine is None or theirs is None else (mine, theirs)


def _steps(run: Run, number: Quantity) -> list[tuple[int, float]]:
    """(step, value) of what was measured on the way."""
    return sorted(
        (int(one.dimensions["step"]), one.value)
        for one in run.select(number.metric, **number.at)
        if "step" in one.dimensions and one.value is not None
    )


def _where_reached(curve: list[tuple[float, float]], x: float) -> float | None:
    """The y at which a curve first comes down to `x`; None where it starts below."""
    for (before, old), (after, new) in pairwise(curve):
        if after <= x <= before:
            part = 0.0 if before == after else (before - x) / (before - after)
            return old + part * (new - old)
    return None
