"""The demo's page: five small charts of defects and their repairs, and their numbers below."""

from collections.abc import Iterator
from dataclasses import replace

from clearhead.records.runs import Records
from clearhead.report import figures, made, narrative, style
from clearhead.report.charts import Looks, Point, chart
from clearhead.report.costs import add_costs
from clearhead.report.page import Page, Panel, section
from clearhead.report.quantities import Quantity, by_arm
from clearhead.report.statistics import summarize

LEAD = (
    "The standard Transformer beside its repairs, in small models that were trained on this "
    "machine: under each chart its numbers, also where a repair does nothing at this size."
)
NUMBERS = (
    "Mean ± standard deviation over seeds. Attention is that of texts from their first token on, "
    "in a made text: after three words the word before them comes again, and a head that copies it "
    "has nothing to do at all others. “repaired” is the trained transformer with its begin token "
    "as a prefix, which then stands for it, and with its hidden states turned: the same function, "
    "without training. Few bits round weights and activations, with one scale a tensor. All models "
    "of a text have one learning rate, which was not tuned."
)
BASE, REPAIRED = "transformer", "repaired"
PARAMETERS = Quantity("parameters", metric="parameters", judged=False, write=style.count)
PERPLEXITY = Quantity("perplexity", metric="trained perplexity")
PERCENT = Quantity("", write=style.percent)
FIRST = replace(
    PERCENT, title="weight on the first token", metric="first_token_mass", at={"map": "softmax"}
)
COPIED = replace(PERCENT, title="weight on the word to copy", metric="copied_share")
COSTS = {
    bits: replace(PERCENT, title=f"at {bits} bits", metric="cost", at={"scheme": scheme})
    for bits, scheme in (("8", "w8a8-coarse"), ("6", "w6a6-coarse"), ("4", "w4a4-coarse"))
}
OF_BITS = (
    Quantity("perplexity", note="full precision", metric="perplexity"),
    *COSTS.values(),
    replace(PERCENT, title="first token a sink", note="of all queries", metric="sink"),
    Quantity("largest hidden number", note="in medians", metric="outlier"),
)
ATTENTION = (
    FIRST,
    replace(FIRST, title="on no token", metric="null_mass"),
    replace(FIRST, title="on the prefix", metric="prefix_mass"),
    COPIED,
)


def only(records: Records, *arms: str) -> Records:
    """The runs of these arms."""
    return Records(runs=tuple(run for run in records.runs if run.arm in arms))


def page(text: Records, sinks: Records, *of_bits: Records) -> Page:
    """The page of the demo, of the records of each part as `run_demo` returns them."""
    lengths = text.dimension("perplexity", "length", task=None)
    whole = Records(runs=tuple(run for one in (text, sinks, *of_bits) for run in one.runs))
    for run in (run for one in of_bits for run in one.runs):
        add_costs(run)
    title = "The Transformer’s defects and repairs"
    built = Page(title=title, kicker="clearhead demo", records=whole, judge=lambda _: [LEAD])
    tables = (
        by_arm(text, "ordinary text", [PARAMETERS, *map(_at, lengths)]),
        by_arm(sinks, "made text", [*ATTENTION, PERPLEXITY]),
        *(by_arm(one, "few bits", OF_BITS) for one in of_bits),
    )
    return built.with_sections(
        section("defects", "", _charts(text, sinks, of_bits[0], built.looks)),
        section("numbers", "", tables, title="The numbers", caption=NUMBERS),
        made.section(whole),
    )


def _charts(text: Records, sinks: Records, bits: Records, looks: Looks) -> Iterator[Panel | None]:
    """A chart a defect; its title has the defect, its note the answer."""
    lengths, blocks = (only(text, BASE, *arms) for arms in (("alibi", "coca"), ("sas-p",)))
    parked, noise = (
        only(sinks, BASE, *arms)
        for arms in (("softmax1", "gated", REPAIRED), ("differential", "differential-v2"))
    )
    longest = max(lengths.dimension("perplexity", "length", task=None), default=0)
    better = ("better", "worse")
    yield _titled(
        figures.perplexity_by_length(lengths, looks),
        "Texts longer than in training",
        narrative.answer(lengths, f"Perplexity at {longest:,} tokens", _at(longest), words=better),
    )
    yield _titled(
        figures.loss(blocks, looks, "tokens"),
        "A simpler block",
        narrative.answer(blocks, "Perplexity", PERPLEXITY, words=better),
        narrative.answer(blocks, "Parameters", PARAMETERS),
    )
    yield _titled(
        _dots(parked, looks, FIRST),
        "The attention sink",
        narrative.answer(parked, "Weight on the first token", FIRST, words=("less", "more")),
    )
    costs = {(arm, ""): _points(bits, arm, COSTS) for arm in bits.arms()}
    yield _titled(
        chart("", costs, looks, "bits", "rise of perplexity (%)", across=[*COSTS]),
        "The cost of few bits",
        narrative.answer(bits, "Rise of perplexity at 4 bits", COSTS["4"], words=("less", "more")),
    )
    yield _titled(
        _dots(noise, looks, COPIED),
        "Attention noise",
        narrative.answer(noise, "Weight on the word to copy", COPIED, words=("less", "more")),
    )


def _at(length: int) -> Quantity:
    return Quantity(f"{length:,}", note="tokens", metric="perplexity", at={"length": length})


def _titled(panel: Panel | None, title: str, *answers: str) -> Panel | None:
    """A panel with its own legend, whose note is the answer."""
    note = " ".join(filter(None, answers))
    return panel and replace(panel, title=title, note=note, own_legend=True)


def _dots(records: Records, looks: Looks, quantity: Quantity) -> Panel | None:
    """A share of each model in per cent."""
    lines = {(arm, ""): _points(records, arm, {arm: quantity}) for arm in records.arms()}
    arms = records.arms()
    panel = chart("", lines, looks, "", "% of attention", across=arms, size=9)
    if panel is not None:  # the axis has the models' names
        panel.figure.update_layout(showlegend=False, yaxis_rangemode="tozero")
    return panel


def _points(records: Records, arm: str, quantities: dict[str, Quantity]) -> list[Point]:
    """Quantities of an arm in per cent: their means and deviations over seeds."""
    over = {
        name: summarize([*records.values(arm, one.metric, **one.at).values()])
        for name, one in quantities.items()
    }
    return [(x, 100 * y.mean, 100 * (y.deviation or 0.0)) for x, y in over.items() if y is not None]
