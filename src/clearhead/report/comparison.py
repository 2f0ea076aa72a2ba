"""The page of records, and the sections of a comparison."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from clearhead.records.runs import COMPARISON, DIAGNOSIS, QUANTIZATION, Records
from clearhead.report import charts, diagnosis, evaluation, narrative, quantization, style
from clearhead.report.page import Page, Section
from clearhead.report.pivots import SHARE, Quantity, by_arm

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
LEAD = (
    Quantity("Validation perplexity", metric="trained perplexity"),
    Quantity(
        "Training speed in tokens/s", metric="tokens_per_second", write=style.count, one_device=True
    ),
)


def page_of(records: Records, title: str = "") -> Page:
    """The page of records of any study; without a title it has the models' names."""
    title = title or narrative.title_of(records)
    page = Page(title=title, kicker="clearhead report", records=records)
    studies = {
        COMPARISON: (sections, verdict),
        DIAGNOSIS: (diagnosis.sections, diagnosis.verdict),
        QUANTIZATION: (quantization.sections, quantization.verdict),
    }
    by_study = {study: [run for run in records.runs if run.study == study] for study in studies}
    parts = {study: Records(runs=tuple(runs)) for study, runs in by_study.items() if runs}
    for study, part in parts.items():
        prefix = f"{study}-" * (len(parts) > 1)
        named = studies[study][0](part, page.looks)
        page.add(replace(one, name=f"{prefix}{one.name}") for one in named)
        page.next += diagnosis.commands(part)
    for study, part in parts.items():
        page.verdict += studies[study][1](part, page.threshold)
    page.verdict = page.verdict or ["There are no records yet."]
    page.add([narrative.provenance(records)])
    for run in by_study[QUANTIZATION]:
        page.warnings += [f"{run.id}: {remark}." for remark in quantization.remarks_on(run)]
    return page


def sections(records: Records, looks: charts.Looks) -> Iterator[Section]:
    """The sections of trained or evaluated models that the records can fill."""
    if _were_trained(records):
        table = by_arm(records, "comparison", comparison(records))
        yield Section("comparison", "The comparison", [table], CAPTION)
    losses = [charts.loss(records.labelled(label), looks) for label in records.labels()]
    yield Section("training", "Learning", losses, LEARNING)
    apart = any(run.header.get("documents") == "apart" for run in records.runs)
    lengths = [charts.perplexity_by_length(records, looks)]
    yield Section("lengths", "Texts longer than in training", lengths, LENGTHS + APART * apart)
    yield from evaluation.sections(records, looks)
    if quantization.schemes(records):
        bits = [quantization.results(records)]
        yield Section("bits", "What few bits cost", bits, quantization.COSTS)
    sink = narrative.answer(records, diagnosis.SINK_SHARE, more=narrative.chance(records))
    inside = [by_arm(records, "inside the models", internals(records))]
    yield Section("internals", "Inside the models", inside, "", sink, folded=True)


def verdict(records: Records, threshold: float) -> list[str]:
    """Perplexity and speed of trained models, else the numbers of the first tasks."""
    lead = [narrative.answer(records, one, threshold=threshold) for one in LEAD]
    sentences = [*filter(None, lead)] if _were_trained(records) else []
    sentences = sentences or evaluation.verdict(records, threshold)
    return sentences or [f"The tables show what was measured of {narrative.title_of(records)}."]


def _were_trained(records: Records) -> bool:
    """True if a run was trained in these records: `clearhead eval` takes models from anywhere."""
    return any(
        run.steps or any("task" not in one.dimensions for one in run.measures.values())
        for run in records.runs
    )


def comparison(records: Records) -> Iterator[Quantity]:
    """Size, perplexity and cost of each arm."""
    millions = partial(Quantity, group="Parameters", note="M", scale=1e-6, judged=False)
    millions = partial(millions, write=partial(style.number, digits=4))
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


def internals(records: Records) -> Iterator[Quantity]:
    """Attention to the first token and outliers of each arm."""
    attention = partial(Quantity, group="First token’s attention", by_map=True, scale=100)
    of_pairs = f"% of query–head pairs{narrative.chance(records)}"
    yield attention("argmax share", note=of_pairs, metric=SHARE)
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
