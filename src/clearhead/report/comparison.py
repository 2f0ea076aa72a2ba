"""The page of records, and the sections of a comparison: cost and perplexity first, models'
internals folded below."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from clearhead.records.runs import COMPARISON, DIAGNOSIS, QUANTIZATION, Measure, Records, Run
from clearhead.report import charts, diagnosis, evaluation, narrative, quantization, style
from clearhead.report.page import Page, Section
from clearhead.report.pivots import (
    SHARE,
    Entry,
    Found,
    Model,
    Pivot,
    Quantity,
    by_arm,
    entry,
    models,
    pivot,
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
ARGMAX = Quantity(
    "argmax share", "First token’s attention", "% of query–head pairs", metric=SHARE, scale=100.0
)
ACTIVATIONS = tuple(
    Quantity(title, group, metric=metric, at={"tokens": tokens})
    for metric, group in (
        ("kurtosis", "Kurtosis of hidden states"),
        ("kurtosis_rotated", "Kurtosis in OrthoAdam’s basis"),
        ("largest_activation", "Largest activation"),
    )
    for tokens, title in (("first", "first token"), ("rest", "other tokens"))
)


def page_of(records: Records, title: str = "") -> Page:
    """The page of records, with the sections of each study that they are of; without a title it has
    the models' names.

    Raises:
        ClearheadError: records of a quantisation without full precision.
    """
    page = Page(
        title=title or narrative.title_of(records), kicker="clearhead report", records=records
    )
    parts = (
        (COMPARISON, sections, verdict),
        (DIAGNOSIS, diagnosis.sections, diagnosis.verdict),
        (QUANTIZATION, quantization.sections, quantization.verdict),
    )
    studies = {run.study for run in records.runs}
    judges = []
    for study, make, judge in parts:
        if study in studies:
            part = Records(runs=tuple(run for run in records.runs if run.study == study))
            prefix = f"{study}-" * (len(studies) > 1)
            made = make(part, page.looks)
            page.add(replace(one, name=f"{prefix}{one.name}") for one in made)
            judges.append(partial(judge, part))
            page.next += diagnosis.commands(part)
    page.verdict = [words for judge in judges for words in judge(page.threshold)]
    page.add([narrative.provenance(records)])
    page.verdict = page.verdict or ["There are no records yet."]
    page.warnings = quantization.warnings(records)
    return page


def sections(records: Records, looks: charts.Looks) -> Iterator[Section]:
    """The sections of trained or evaluated models that the records can fill."""
    if _were_trained(records):
        yield Section("comparison", "The comparison", [comparison(records)], CAPTION)
    losses = [charts.loss(records.labelled(label), looks) for label in records.labels()]
    yield Section("training", "Learning", losses, LEARNING)
    apart = any(run.header.get("documents") == "apart" for run in records.runs)
    lengths = [charts.perplexity_by_length(records, looks)]
    yield Section("lengths", "Texts longer than in training", lengths, LENGTHS + APART * apart)
    yield from evaluation.sections(records, looks)
    if quantization.schemes(records):
        bits = [quantization.results(records)]
        yield Section("bits", "What few bits cost", bits, quantization.COSTS)
    sink = narrative.answer(
        records,
        "Queries that look most at the first token",
        Quantity("", metric="sink", write=style.percent),
        more=narrative.chance(records),
    )
    inside = [internals(records)]
    yield Section("internals", "Inside the models", inside, "", sink, folded=True)
    equal = [at_equal_loss(records)]
    yield Section("equal-loss", "Outliers at equal loss", equal, EQUAL, folded=True)


def verdict(records: Records, threshold: float) -> list[str]:
    """Perplexity and speed of trained models, else the numbers of the first tasks."""
    lead = (narrative.answer(records, *one, threshold=threshold) for one in LEAD)
    said = [*filter(None, lead)] if _were_trained(records) else []
    said = said or evaluation.verdict(records, threshold)
    return said or [f"The tables show what was measured of {narrative.title_of(records)}."]


def _were_trained(records: Records) -> bool:
    """True if a run was trained in these records: `clearhead eval` takes models from anywhere."""
    return any(
        run.steps or any("task" not in one.dimensions for one in run.measures.values())
        for run in records.runs
    )


def comparison(records: Records) -> Pivot | None:
    """Size, perplexity and cost of each arm."""
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
    """Attention to the first token and outliers of each arm."""
    of_pairs = f"% of query–head pairs{narrative.chance(records)}"
    attention = partial(Quantity, group="First token’s attention", by_map=True, scale=100)
    shares = (
        attention("argmax share", note=of_pairs, metric=SHARE),
        attention("mean mass", note="%", metric="first_token_mass"),
        attention("mass on no token", note="%", metric="null_mass"),
        attention("mass on learned keys", note="%", metric="prefix_mass"),
    )
    return by_arm(records, "inside the models", (*shares, *ACTIVATIONS))


def at_equal_loss(records: Records) -> Pivot | None:
    """Each arm, and below it the reference, where both had the same validation loss.

    Seed by seed that is the higher of the two lowest losses; values between two measurements are
    interpolated. A seed counts only where both models were measured before and after.
    """
    cells = []
    for model in (model for model in models(records) if model.arm != model.reference):
        maps = model.records.dimension(SHARE, "map", model.reference)[:1]
        shares = (replace(ARGMAX, at={"map": name}) for name in maps)
        cells += [(model.heading, one, _equal(model, one)) for one in (LOSS, *ACTIVATIONS, *shares)]
    return pivot("at equal loss", cells, "model")


def _equal(model: Model, number: Quantity) -> tuple[Entry, ...]:
    """The numbers of a model and of its reference at equal loss."""
    mine, theirs = Found(), Found()
    others = {run.seed: run for run in model.records.of(model.reference)}
    for run in (run for run in model.records.of(model.arm) if run.seed in others):
        curves = [_by_loss(one, number) for one in (run, others[run.seed])]
        if all(curves):
            equal = max(min(loss for loss, _ in curve) for curve in curves)
            values = [equal if number is LOSS else _where_reached(one, equal) for one in curves]
            if None not in values:
                for side, value in zip((mine, theirs), values, strict=True):
                    side[run.seed] = [Measure(metric="", value=value)]
    if not mine:
        return ()
    if number is LOSS:
        return (entry(mine, {}, number, model),)
    beside = replace(entry(theirs, {}, number, model), name=model.reference)
    return entry(mine, theirs, number, model), beside


def _by_loss(run: Run, number: Quantity) -> list[tuple[float, float]]:
    """(loss, value) of the steps at which both were measured, in order."""
    losses = {one.dimensions.get("step"): one.value for one in run.select(LOSS.metric)}
    values = {
        one.dimensions.get("step"): one.value for one in run.select(number.metric, **number.at)
    }
    known = [(step, losses.get(step), values[step]) for step in values if step is not None]
    return [(x, y) for _, x, y in sorted(known) if x is not None and y is not None]


def _where_reached(curve: list[tuple[float, float]], x: float) -> float | None:
    """The y at which a curve first comes down to `x`; None where it starts below."""
    for (before, old), (after, new) in pairwise(curve):
        if after <= x <= before:
            part = 0.0 if before == after else (before - x) / (before - after)
            return old + part * (new - old)
    return None
