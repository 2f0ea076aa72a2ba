"""The page of a comparison: cost and perplexity first, what models do inside folded below."""

from collections.abc import Callable, Iterable, Iterator

from clearhead.records.runs import Records
from clearhead.report import (
    evaluation,
    figures,
    heatmaps,
    made,
    milestones,
    narrative,
    quantization,
    style,
)
from clearhead.report.charts import Looks
from clearhead.report.costs import add_costs, four_digits
from clearhead.report.figures import by_token
from clearhead.report.page import Block, Choice, Notes, Page, Panel, Panels, Section, section
from clearhead.report.pivots import Heading, Pivot, Quantity, at, by_arm, in_header
from clearhead.report.speedup import speedup_section

Columns = Iterator[tuple[Heading, Quantity]]
_FIRST_TOKEN = "First token’s attention"


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
        warnings=narrative.warnings(records),
    )
    looks = built.looks
    return built.with_sections(
        _comparison(records) if trained else None,
        speedup_section(records),
        _training(records, looks),
        _lengths(records, looks),
        *evaluation.sections(records, looks, lead=not trained),
        _few_bits(records),
        _internals(records),
        _equal_loss(records, looks),
        _attention(records),
        _first_token(records),
        _layers(records, looks),
        made.section(records) if records.runs else None,
    )


def tables(records: Records, make: Callable[[Records], Pivot | None]) -> Iterator[Block]:
    """A table of each set of records, under its mark."""
    for tag, labelled in narrative.sets(records):
        pivot = make(labelled)
        if pivot is not None:
            yield tag
            yield pivot


def side_by_side(
    records: Records, makers: Iterable[Callable[[Records], Panel | None]]
) -> Iterator[Block]:
    """The figures of each set of records, under its mark."""
    makers = list(makers)
    for tag, labelled in narrative.sets(records):
        panels = tuple(panel for maker in makers if (panel := maker(labelled)) is not None)
        if panels:
            yield tag
            yield Panels(panels=panels)


def comparison(records: Records) -> Pivot | None:
    """Size, perplexity and cost of each arm, over the runs of one label."""
    return by_arm(records, "comparison", _outside(records))


def _comparison(records: Records) -> Section | None:
    return section("comparison.comparison", "", tables(records, comparison))


def _outside(records: Records) -> Columns:
    for title, name in (("all", "parameters"), ("without embeddings", "non_embedding_parameters")):
        yield (
            Heading(group="Parameters", title=title, note="M"),
            Quantity(read=in_header(name), scale=1e-6, judged=False, write=four_digits),
        )
    group = "Validation perplexity by length of text"
    yield Heading(group=group, title="overall"), Quantity(read=at("perplexity"))
    trained = records.sequence_length()
    for metric, heading, unit in (
        ("perplexity", group, ""),
        ("masked loss", "Validation loss at hidden tokens", "nats; "),
    ):
        for length in records.dimension(metric, "length", task=None):
            title = f"{length / trained:g} ×" if trained else f"{length:,}"
            note = f"{unit}{length:,} tokens" if trained else unit.removesuffix("; ")
            yield (
                Heading(group=heading, title=title, note=note),
                Quantity(read=at(metric, length=length)),
            )
    yield from _classification(records)
    group = "Cost"
    yield (
        Heading(group=group, title="training speed", note="tokens/s"),
        Quantity(read=at("tokens_per_second"), one_device=True),
    )
    yield (
        Heading(group=group, title="peak memory", note="MiB"),
        Quantity(read=at("peak_memory_bytes"), scale=2.0**-20, one_device=True),
    )


def _few_bits(records: Records) -> Section | None:
    for run in records.runs:
        add_costs(run)
    if not quantization.schemes(records):
        return None
    costs = tables(records, quantization.results)
    return section("comparison.bits", "", costs)


def _classification(records: Records) -> Columns:
    """Metrics of fine-tuned classifiers, split by split."""
    measured = dict.fromkeys(
        (one.metric, one.dimensions["split"])
        for run in records.runs
        if "task" in run.header
        for one in run.measures.values()
        if "split" in one.dimensions
    )
    for metric, split in measured:
        heading = Heading(group="Classification", title=metric, note=split)
        yield heading, Quantity(read=at(metric, split=split))


def _inside(records: Records) -> Columns:
    floor = narrative.chance_floor(records)
    pairs = "% of query–head pairs" + (f"; chance {style.percent(floor)}" if floor else "")
    for metric, title, note in (
        ("first_token_argmax_share", "argmax share", pairs),
        ("first_token_mass", "mean mass", "%"),
        ("null_mass", "mass on no token", "%"),
        ("prefix_mass", "mass on learned keys", "%"),
    ):
        heading = Heading(group=_FIRST_TOKEN, title=title, note=note)
        yield heading, Quantity(by_map=metric, scale=100)
    for metric, group in (
        ("kurtosis", "Kurtosis of hidden states"),
        ("kurtosis_rotated", "Kurtosis in OrthoAdam’s basis"),
        ("largest_activation", "Largest activation"),
    ):
        for tokens, title in (("first", "first token"), ("rest", "other tokens")):
            yield Heading(group=group, title=title), Quantity(read=at(metric, tokens=tokens))


def internals(records: Records) -> Pivot | None:
    """Attention to the first token and outliers of each arm, over the runs of one label."""
    return by_arm(records, "inside the models", _inside(records))


def _internals(records: Records) -> Section | None:
    answers = filter(None, (narrative.sink(labelled) for _, labelled in narrative.sets(records)))
    return section("comparison.internals", " ".join(answers), tables(records, internals))


def _training(records: Records, looks: Looks) -> Section | None:
    return section(
        "comparison.training",
        narrative.answer(records, "Seconds of training", "train_seconds", "{:,.0f}".format),
        side_by_side(
            records,
            (
                lambda labelled: figures.loss(labelled, looks, "tokens"),
                lambda labelled: figures.loss(labelled, looks, "seconds"),
            ),
        ),
    )


def _equal_loss(records: Records, looks: Looks) -> Section | None:
    def maker(milestone: milestones.Milestone) -> Callable[[Records], Panel | None]:
        return lambda labelled: milestones.against_loss(labelled, looks, milestone)

    return section(
        "comparison.equal-loss",
        "Outliers grow as a model learns, so models are compared where both were equally good.",
        (
            *tables(records, milestones.at_equal_loss),
            *side_by_side(records, map(maker, milestones.MILESTONES)),
        ),
    )


def _lengths(records: Records, looks: Looks) -> Section | None:
    lengths = records.dimension("perplexity", "length", task=None)
    apart = any(run.header.get("documents") == "apart" for run in records.runs)
    return section(
        "comparison.lengths",
        narrative.answer(
            records,
            f"Mean perplexity at {max(lengths):,} tokens",
            "perplexity",
            length=max(lengths),
        )
        if lengths
        else "",
        side_by_side(records, (lambda labelled: figures.perplexity_by_length(labelled, looks),)),
        " Documents were kept apart, as in training: a longer window is a longer text only where "
        "documents are as long." * apart,
    )


def maps(records: Records) -> Iterator[Block]:
    """The attention maps of all sets of records, under what chooses layer and head."""
    blocks: list[Block] = []
    shown: list[Panel] = []
    for tag, labelled in narrative.sets(records):
        panels = heatmaps.attention(labelled)
        if panels:
            blocks += [tag, Panels(panels=tuple(panels), shape="map")]
            shown += panels
    packed = [panel.attention for panel in shown if panel.attention]
    if packed:
        signed = any(one["signed"] for one in packed)
        yield Choice(
            layers=tuple(sorted({layer for one in packed for layer in one["layers"]})),
            heads=max(len(one["heads"]) for one in packed),
        )
        yield heatmaps.WEIGHTS
        yield from (heatmaps.SIGNED,) if signed else ()
        yield Notes(texts=("Colour steps follow the square root of the weight.",))
    yield from blocks


def _attention(records: Records) -> Section | None:
    return section(
        "comparison.attention",
        "All models read the same text; a strong first column is attention parked on the first "
        "token.",
        maps(records),
    )


def _first_token(records: Records) -> Section | None:
    largest = heatmaps.largest_share(records)
    blocks: list[Block] = [heatmaps.share_scale(largest)]
    for tag, labelled in narrative.sets(records):
        panels = heatmaps.first_token_share(labelled, largest)
        if panels:
            floor = narrative.chance_floor(labelled)
            chance = "" if floor is None else f"Chance: {style.percent(floor)}. "
            seeds = sorted({labelled.of(arm)[0].seed for arm in labelled.arms()})
            note = f"{chance}Seed {', '.join(map(str, seeds))}."
            blocks += [tag, Notes(texts=(note,)), Panels(panels=tuple(panels), shape="cells")]
    return section(
        "comparison.first-token",
        f"The head that looks there most does so for {style.percent(largest)} of its queries.",
        blocks,
    )


def _layers(records: Records, looks: Looks) -> Section | None:
    def maker(metric: str, title: str, axis: str) -> Callable[[Records], Panel | None]:
        return lambda labelled: figures.by_layer(
            labelled, looks, title, axis, by_token(metric), log=True
        )

    return section(
        "comparison.layers",
        narrative.answer(
            records,
            "Mean largest activation of the first token",
            "largest_activation",
            tokens="first",
        ),
        side_by_side(
            records,
            (
                maker("kurtosis", "Kurtosis by layer", "kurtosis (3 = Gaussian)"),
                maker(
                    "kurtosis_rotated",
                    "Kurtosis by layer in OrthoAdam’s basis",
                    "kurtosis, rotated (3 = Gaussian)",
                ),
                maker("largest_activation", "Largest activation by layer", "largest |activation|"),
            ),
        ),
    )
