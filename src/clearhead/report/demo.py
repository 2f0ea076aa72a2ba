"""The demo's page: a sentence and a section a defect."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from clearhead.records.runs import Records
from clearhead.report import figures, heatmaps, made, narrative, style
from clearhead.report.costs import add_costs
from clearhead.report.page import Page, Panel, section
from clearhead.report.pivots import Entry, Heading, Pivot, build
from clearhead.report.quantities import SHARE, Quantity, by_arm

TITLE = "Defects of the Transformer, and what repairs them"
LEAD = (
    "What the standard Transformer gets wrong, and what each repair does to it, in small models "
    "that train in minutes."
)
WORDS = (
    (
        "Texts longer than in training",
        "Perplexity is the number of next tokens that would surprise as much if all were equally "
        "likely: lower is better. A line that rises to the right of the mark belongs to a model "
        "that copes badly with texts longer than it was trained on.",
    ),
    (
        "A block without skips, values and projections",
        "A lower curve learns more from the same text. SAS-P leaves out the skip connections and "
        "the matrices for values and projections; shaped attention, which starts as the identity, "
        "makes up for them.",
    ),
    (
        "The attention sink",
        "In this made text three words are followed by a copy of the word before them. A head that "
        "copies has nothing to do at all other words, and parks its weights on the first token. A "
        "null key (softmax1, or learned: key-bias) is another place to park them, a gate (gated) "
        "can switch the head off. Heads are the first seed’s, the table is of all seeds.",
    ),
    (
        "Outliers, and the cost of 8 bits",
        "Where one scale serves a whole tensor, its largest number decides how finely all others "
        "are written. Small models trained for a minute have no outliers; larger ones do.",
    ),
)
COARSE = "w8a8-coarse"  # 8 bits, a scale a tensor
MASS = "first_token_mass"
BASE, SHAPED, ALIBI, COCA = "transformer", "sas-p", "alibi", "coca"
PARAMETERS = Quantity(
    "parameters",
    note="M",
    metric="parameters",
    scale=1e-6,
    judged=False,
    write=style.number,
)
SINK = [
    Quantity(title, note=note, metric=metric, at={"map": "softmax"}, write=style.percent)
    for title, note, metric in (
        ("weight on the first token", "", MASS),
        ("weight on no token", "", "null_mass"),
        ("largest weight on the first token", "of all queries", SHARE),
    )
]


def only(records: Records, *arms: str) -> Records:
    """The runs of these arms."""
    return Records(runs=tuple(run for run in records.runs if run.arm in arms))


def page(
    *, text: Records, sinks: Records, bits: Records, pretrained: Sequence[Records] = ()
) -> Page:
    """The page of the demo, of the records of each part."""
    of_bits = (bits, *pretrained)
    whole = Records(runs=tuple(run for one in (text, sinks, *of_bits) for run in one.runs))
    built = Page(
        title=TITLE,
        kicker="clearhead demo",
        records=whole,
        judge=lambda threshold: [LEAD, *filter(None, answers)],
    )
    lengths, blocks = (only(text, BASE, *arms) for arms in ((ALIBI, COCA), (SHAPED,)))
    longest = max(lengths.dimension("perplexity", "length", task=None), default=0)
    trained = text.sequence_length()
    better = ("better", "worse")
    answers = [
        narrative.answer(
            lengths,
            f"Perplexity at {longest:,} tokens, after training at {trained or 0:,}",
            Quantity("", metric="perplexity", at={"length": longest}),
            words=better,
        ),
        narrative.answer(blocks, "Perplexity", _perplexity(blocks), words=better),
        narrative.answer(
            sinks,
            "Weight on the first token",
            Quantity("", metric=MASS, at={"map": "softmax"}, write=style.percent),
            words=("less", "more"),
        ),
    ]
    largest = heatmaps.largest_share(sinks)
    tables = {
        "lengths": (
            _own_legend(figures.perplexity_by_length(lengths, built.looks)),
            by_arm(lengths, "perplexity by length", _by_length(lengths)),
        ),
        "blocks": (
            _own_legend(figures.loss(blocks, built.looks, "tokens")),
            by_arm(blocks, "blocks", [PARAMETERS, _perplexity(blocks)]),
        ),
        "sinks": (
            heatmaps.share_scale(largest),
            *heatmaps.first_token_share(sinks, largest),
            by_arm(sinks, "the sink", [*SINK, _perplexity(sinks)]),
        ),
        "bits": (_bits(of_bits),),
    }
    return built.with_sections(
        *(
            section(name, "", blocks, title=title, caption=caption)
            for (name, blocks), (title, caption) in zip(tables.items(), WORDS, strict=True)
        ),
        made.section(whole),
    )


def _own_legend(panel: Panel | None) -> Panel | None:
    """A panel whose legend has its few models, not those of the whole page."""
    return panel and replace(panel, own_legend=True)


def _perplexity(records: Records) -> Quantity:
    return Quantity("perplexity", metric="perplexity", at={"length": records.sequence_length()})


def _by_length(records: Records) -> Iterator[Quantity]:
    for length in records.dimension("perplexity", "length", task=None):
        yield Quantity(f"{length:,}", note="tokens", metric="perplexity", at={"length": length})


def _bits(records: Sequence[Records]) -> Pivot | None:
    """Outliers and what 8 bits cost, of each model by its diagnosis and its quantisation."""
    columns = [
        replace(SINK[-1], title="first token a sink"),
        Quantity("largest hidden number", note="in medians", metric="outlier"),
        Quantity("perplexity", note="full precision", metric="perplexity"),
        Quantity("in 8 bits", note="a scale a tensor", metric="perplexity", at={"scheme": COARSE}),
        Quantity("change", metric="cost", at={"scheme": COARSE}, write=style.percent),
    ]
    for run in (run for one in records for run in one.runs):
        add_costs(run)
    arms = dict.fromkeys(arm for one in records for arm in one.arms())

    def fill(arm: str, quantity: Quantity) -> tuple[Entry, ...]:
        cells = (quantity.entries(only(one, arm), arm, arm) for one in records)
        return next(filter(None, cells), ())

    rows = [(Heading(arm, arm=arm), arm) for arm in arms]
    return build("outliers and 8 bits", rows, [(x, x) for x in columns], fill, corner="model")
