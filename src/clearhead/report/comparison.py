"""The page of a comparison: cost and perplexity first, what models do inside folded below."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

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
from clearhead.report.page import Block, Choice, Notes, Page, Panel, Section, section
from clearhead.report.pivots import Pivot, Quantity, at, by_arm, in_header

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
    answer = partial(narrative.answer, records)
    longest = max(records.dimension("perplexity", "length", task=None), default=0)
    apart = any(run.header.get("documents") == "apart" for run in records.runs)
    return built.with_sections(
        section("comparison.comparison", "", each(records, comparison)) if trained else None,
        section(
            "comparison.training",
            answer("Seconds of training", at("train_seconds"), "{:,.0f}".format),
            each(
                records,
                lambda mine: figures.loss(mine, looks, "tokens"),
                lambda mine: figures.loss(mine, looks, "seconds"),
            ),
        ),
        section(
            "comparison.lengths",
            answer(f"Mean perplexity at {longest:,} tokens", at("perplexity", length=longest)),
            each(records, lambda mine: figures.perplexity_by_length(mine, looks)),
            " Documents were kept apart, as in training: a longer window is a longer text only "
            "where documents are as long." * apart,
        ),
        *evaluation.sections(records, looks),
        _few_bits(records),
        section(
            "comparison.internals",
            narrative.answer(
                records,
                "Queries that look most at the first token",
                heatmaps.share_of_queries,
                style.percent,
                more=chance(records),
            ),
            each(records, internals),
        ),
        section(
            "comparison.equal-loss",
            "Outliers grow as a model learns, so models are compared where both were equally good.",
            each(
                records,
                milestones.at_equal_loss,
                *(
                    partial(milestones.against_loss, looks=looks, milestone=one)
                    for one in milestones.MILESTONES
                ),
            ),
        ),
        section(
            "comparison.attention",
            "All models read the same text; a strong first column is attention parked on the first "
            "token.",
            maps(records),
        ),
        _first_token(records),
        section(
            "comparison.layers",
            answer(
                "Mean largest activation of the first token",
                at("largest_activation", tokens="first"),
            ),
            each(
                records,
                *(
                    partial(_by_layer, looks=looks, one=one)
                    for one in milestones.MILESTONES
                    if one.by_tokens
                ),
            ),
        ),
        made.section(records) if records.runs else None,
    )


def each(
    records: Records, *makers: Callable[[Records], Block | list[Block] | None]
) -> Iterator[Block]:
    """The tables and figures of each set of records, under its mark."""
    for tag, labelled in narrative.sets(records):
        made = [make(labelled) for make in makers]
        blocks = [
            block for one in made if one for block in (one if isinstance(one, list) else [one])
        ]
        yield from [tag, *blocks] if blocks else []


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
    yield millions("all", read=in_header("parameters"))
    yield millions("without embeddings", read=in_header("non_embedding_parameters"))
    group = "Validation perplexity by length of text"
    yield Quantity("overall", group, read=at("perplexity"))
    trained = records.sequence_length()
    for metric, heading, unit in (
        ("perplexity", group, ""),
        ("masked loss", "Validation loss at hidden tokens", "nats; "),
    ):
        for length in records.dimension(metric, "length", task=None):
            title = f"{length / trained:g} ×" if trained else f"{length:,}"
            note = f"{unit}{length:,} tokens" if trained else unit.removesuffix("; ")
            yield Quantity(title, heading, note, read=at(metric, length=length))
    splits = dict.fromkeys(
        (one.metric, one.dimensions["split"])
        for run in records.runs
        if "task" in run.header  # a fine-tuned classifier
        for one in run.measures.values()
        if "split" in one.dimensions
    )
    for metric, split in splits:
        yield Quantity(metric, "Classification", split, read=at(metric, split=split))
    cost = partial(Quantity, group="Cost", one_device=True)
    yield cost("training speed", note="tokens/s", read=at("tokens_per_second"))
    yield cost("peak memory", note="MiB", read=at("peak_memory_bytes"), scale=2.0**-20)


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
        yield Quantity(title, _FIRST_TOKEN, note, by_map=metric, scale=100)
    for metric, group in (
        ("kurtosis", "Kurtosis of hidden states"),
        ("kurtosis_rotated", "Kurtosis in OrthoAdam’s basis"),
        ("largest_activation", "Largest activation"),
    ):
        for tokens, title in (("first", "first token"), ("rest", "other tokens")):
            yield Quantity(title, group, read=at(metric, tokens=tokens))


def maps(records: Records) -> Iterable[Block]:
    """The attention maps of all sets of records, under what chooses layer and head."""
    blocks = list(each(records, lambda mine: [*heatmaps.attention(mine)]))
    packed = [one.attention for one in blocks if isinstance(one, Panel) and one.attention]
    if not packed:
        return []
    layers = tuple(sorted({layer for one in packed for layer in one["layers"]}))
    choice = Choice(layers=layers, heads=max(len(one["heads"]) for one in packed))
    signed = [heatmaps.SIGNED] * any(one["signed"] for one in packed)
    note = Notes(texts=("Colour steps follow the square root of the weight.",))
    return [choice, heatmaps.WEIGHTS, *signed, note, *blocks]


def _first_token(records: Records) -> Section | None:
    largest = heatmaps.largest_share(records)

    def panels(labelled: Records) -> list[Block]:
        seeds = sorted({labelled.of(arm)[0].seed for arm in labelled.arms()})
        words = f"Seed {', '.join(map(str, seeds))}{chance(labelled)}."
        found = heatmaps.first_token_share(labelled, largest)
        return [Notes(texts=(words,)), *found] if found else []

    return section(
        "comparison.first-token",
        f"The head that looks there most does so for {style.percent(largest)} of its queries.",
        (heatmaps.share_scale(largest), *each(records, panels)),
    )


def _few_bits(records: Records) -> Section | None:
    for run in records.runs:
        add_costs(run)
    bits = quantization.schemes(records)
    return section("comparison.bits", "", each(records, quantization.results)) if bits else None


def _by_layer(records: Records, looks: Looks, one: milestones.Milestone) -> Panel | None:
    lines, title = by_token(one.metric), f"{one.title} by layer"
    return figures.by_layer(records, looks, title, one.axis, lines, log=True)
