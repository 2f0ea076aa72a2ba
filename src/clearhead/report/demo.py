"""The demo's page: five small charts of defects and their repairs, and their numbers below."""

from collections.abc import Iterator
from dataclasses import replace

from clearhead.records.runs import Records
from clearhead.report import charts, narrative, style
from clearhead.report.charts import Looks, chart
from clearhead.report.page import Page, Panel, Section
from clearhead.report.pivots import Quantity, by_arm

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


def page(text: Records, sinks: Records, *of_bits: Records) -> Page:
    """The page of the demo, of the records of each part as `run_demo` returns them."""
    lengths = map(_at, text.dimension("perplexity", "length", task=None))
    whole = Records(runs=tuple(run for one in (text, sinks, *of_bits) for run in one.runs))
    title = "The Transformer’s defects and repairs"
    built = Page(title=title, kicker="clearhead demo", records=whole, verdict=[LEAD])
    tables = (
        by_arm(text, "ordinary text", [PARAMETERS, *lengths]),
        by_arm(sinks, "made text", [*ATTENTION, PERPLEXITY]),
        *(by_arm(one, "few bits", OF_BITS) for one in of_bits),
    )
    defects = Section("defects", "", _charts(text, sinks, of_bits[0], built.looks))
    numbers = Section("numbers", "The numbers", tables, NUMBERS)
    built.add([defects, numbers, narrative.provenance(whole)])
    return built


def _at(length: int) -> Quantity:
    return Quantity(f"{length:,}", note="tokens", metric="perplexity", at={"length": length})


def _charts(text: Records, sinks: Records, bits: Records, looks: Looks) -> Iterator[Panel | None]:
    """A chart a defect; its title has the defect, its note the answer."""

    def only(records: Records, *arms: str) -> Records:
        return Records(runs=tuple(run for run in records.runs if run.arm in (BASE, *arms)))

    def answered(
        panel: Panel | None, title: str, records: Records, **numbers: Quantity
    ) -> Panel | None:
        titled = (replace(one, title=what) for what, one in numbers.items())
        notes = (narrative.answer(records, one) for one in titled)
        return panel and replace(panel, title=title, note=" ".join(filter(None, notes)))

    lengths, blocks = only(text, "alibi", "coca"), only(text, "sas-p")
    longest = max(lengths.dimension("perplexity", "length", task=None), default=0)
    by_length, by_tokens = charts.perplexity_by_length(lengths, looks), charts.loss(blocks, looks)
    at_longest = {f"Perplexity at {longest:,} tokens": _at(longest)}
    yield answered(by_length, "Texts longer than in training", lengths, **at_longest)
    numbers = {"Perplexity": PERPLEXITY, "Parameters": PARAMETERS}
    yield answered(by_tokens, "A simpler block", blocks, **numbers)
    for title, records, axis, quantities in (
        ("The attention sink", only(sinks, "softmax1", "gated", REPAIRED), "", {"": FIRST}),
        ("The cost of few bits", bits, "bits", COSTS),
        ("Attention noise", only(sinks, "differential", "differential-v2"), "", {"": COPIED}),
    ):
        lines = charts.lines(records, {"": quantities})
        lines["x"] = lines["x"].where(lines["x"] != "", lines["arm"])  # without a name by model
        across = [*quantities] if axis else records.arms()
        y, up = ("rise of perplexity (%)", "") if axis else ("% of attention", "zero")
        last = [*quantities.values()][-1]
        what = f"Rise of perplexity {last.title}" if axis else last.title.capitalize()
        panel = chart("", lines, looks, axis, y, across=across, up=up)
        yield answered(panel, title, records, **{what: last})
