"""The sections of a diagnosis: three numbers, heads and norms; the rest folded below."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from clearhead.records.runs import LOST, Records, Run
from clearhead.report import charts, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.page import Facts, Panel, Section
from clearhead.report.pivots import SHARE, Quantity, models, pivot

SAMPLED = (
    "Every number is over all queries, heads and tokens read, but for what is named as sampled: "
    "the median (one number in 8, one query in 16), the effective rank (4 texts) and the order "
    "with content held (64 pairs a text and layer). docs/diagnose.md defines each."
)
FIRST = (
    "The share of a head’s queries (in %) whose largest weight is on the first token; and the norm "
    "of the hidden states, first token and others apart."
)
# The findings of the advice that a repair without training removes.
SINK, MASSIVE = SHARE, "hidden_top_1 / hidden_median"
NORMS = ("norm_first", "norm_rest")
REPAIRED = ("Clearhead", "Llama", "Mistral", "Qwen2", "Qwen3")  # families that it reads
SHARES = (
    *(SINK, "first_token_mass", "sink_rate_0.3", "null_mass", "prefix_mass", "chance_floor"),
    *("anomalous_before", "anomalous_after", "anomalous_weight_before", "order_broken_content"),
)
"""Numbers that are shown in per cent."""
FIRST_LAYER, LAST_LAYER = {"layer": "first"}, {"layer": "last"}
PARTS = [{"tokens": tokens} for tokens in ("first", "rest", "prefix")]
RANKS = ("top_1", "top_2", "top_3", "top_10", "top_100", "median")
# By group, metrics and where they are read; without a place, of each attention map or once.
NUMBERS: dict[str, list[tuple[str, Sequence[Mapping[str, str]]]]] = {
    "Attention": [
        *((metric, ()) for metric in (*SHARES[:6], "entropy", "entropy_ceiling")),
        ("lambda", (FIRST_LAYER, LAST_LAYER)),
    ],
    "Hidden states and logits": [
        ("kurtosis", PARTS[:2]),
        ("kurtosis_excess", ()),
        *((f"{kind}_{rank}", ()) for kind in ("hidden", "logit") for rank in RANKS),
        *((name, ()) for name in ("outlier_channels", *LOST)),
    ],
    "Keys and values": [("largest_key", PARTS), ("largest_value", PARTS)],
    "Order": [(metric, ()) for metric in SHARES[6:]],
    "Values and projections W = α W_init + β ΔW": [
        ("beta_over_alpha_values", (FIRST_LAYER,)),
        ("beta_over_alpha", ()),
    ],
    "Stream": [
        (metric, (LAST_LAYER,))
        for metric in ("similarity", "effective_rank", "effective_rank_without_first", *NORMS)
    ],
}
# Further numbers that have a chart by layer.
BY_LAYER = [("largest_activation", PARTS[:2]), ("beta_over_alpha_projections", ())]
THREE = (
    Quantity(
        "queries whose largest weight is on the first token",
        note="sink",
        metric=SINK,
        by_map=True,
        write=style.percent,
    ),
    Quantity("largest hidden number, in medians", note="outliers", metric="outlier"),
    Quantity(
        "similarity of tokens after the last layer",
        note="mean cosine; 1 is rank collapse",
        metric="similarity",
        at=LAST_LAYER,
    ),
)
SINK_SHARE = Quantity(
    "Queries that look most at the first token", metric="sink", write=style.percent
)


def sections(records: Records, looks: Looks) -> Iterator[Section]:
    """The sections of one model, or of several side by side."""
    if len(records.arms()) > 1:
        three = pivot("three numbers", THREE, models(records), Quantity.entries)
        yield Section("comparison", "Three numbers", [three])
    heads = charts.first_token_share(records)
    if len(heads) == 1:  # of one model, without a name over it
        heads[0].shape = "curve"
        heads[0].title = "Queries that look most at the first token, by head"
    norms: charts.Metrics = {"first token": (NORMS[0], {}), "others": (NORMS[1], {})}
    stream = charts.by_layer(records, looks, "Norm of the stream by layer", "√Σx²", norms, "auto")
    yield Section("first", "Heads and layers", [*heads, stream], FIRST)
    yield Section("findings", "What was found, and what to do", [_findings(records)], folded=True)
    yield Section("layers", "By layer", _by_layer(records, looks), folded=True)
    table = pivot("all numbers", numbers(), models(records), Quantity.entries)
    yield Section("numbers", "All the numbers", [table], SAMPLED, folded=True)


def numbers() -> Iterator[Quantity]:
    """The numbers of the page's table."""
    for group, metrics in NUMBERS.items():
        for metric, at in ((metric, at) for metric, places in metrics for at in places or ({},)):
            places = [f"{one} {name}" for name, one in at.items()]
            title = ", ".join([metric.replace("_", " "), *places])
            write = style.percent if metric in SHARES else None
            by_map = metric in (*SHARES[:5], "entropy")
            yield Quantity(title, group, metric=metric, at=at, write=write, by_map=by_map)


def _by_layer(records: Records, looks: Looks) -> Iterator[Panel | None]:
    metrics = [one for ones in NUMBERS.values() for one in ones]
    for metric, places in (*metrics, *BY_LAYER):
        maps: list[Mapping[str, str]] = [{"map": name} for name in records.dimension(metric, "map")]
        ats = maps or [at for at in places if "layer" not in at] or [{}]
        lines: charts.Metrics = {" ".join(at.values()): (metric, at) for at in ats}
        title, up = metric.replace("_", " "), "zero" if metric in SHARES else "auto"
        yield charts.by_layer(records, looks, title, title, lines, up)


def verdict(records: Records, threshold: float) -> list[str]:
    """The three numbers, of several models the first; and whether any is a defect."""
    alone = {
        "{} of queries look most at the first token": SINK_SHARE,
        "Largest hidden number: {} × the median": THREE[1],
        "Mean cosine of tokens after the last layer: {}": replace(THREE[2], write="{:.2f}".format),
    }
    ends = {SINK_SHARE: narrative.chance(records)}
    sentences = [
        narrative.answer(records, one, threshold=threshold, alone=words, more=ends.get(one, ""))
        for words, one in [*alone.items()][: 3 if len(records.arms()) == 1 else 1]
    ]
    sentences = [*filter(None, sentences)]
    if not sentences:
        return [f"No sink, outlier or similarity was measured of {narrative.title_of(records)}."]
    lost = [run.arm for run in records.runs if any(map(run.value, LOST))]
    sound = [run.arm for run in records.runs if run.arm not in lost and not _symptoms(run)]

    def of(arms: list[str]) -> str:
        return "" if len(arms) == len(records.runs) else f" in {narrative.enumerate_words(arms)}"

    before = [f"Not finite: hidden states or logits{of(lost)}."] if lost else []
    after = [f"No sink, no massive activations{of(sound)}."] if sound else []
    return [" ".join([*before, *sentences, *after])]


def _symptoms(run: Run) -> set[str]:
    """Those of `SINK` and `MASSIVE` that the diagnosis gives advice on."""
    return {line["metric"] for line in run.payload("advice")} & {SINK, MASSIVE}


def commands(records: Records) -> Iterator[str]:
    """The commands that take massive activations, or only a sink, away from the models."""
    for run in (records.of(arm)[0] for arm in records.arms()):
        own_null = bool(run.select("null_mass") or run.select("prefix_mass"))
        family = str(run.header.get("architecture", "")).removesuffix("ForCausalLM")
        fresh, symptoms = run.id.startswith("init:"), _symptoms(run)
        if symptoms and family in REPAIRED and not (own_null or fresh):
            turned = " --rotate residual values down" if MASSIVE in symptoms else ""
            yield f"clearhead convert {shlex.quote(run.id)} repaired --prefix '\\n'{turned}"


def _findings(records: Records) -> Facts | None:
    """Advice with its support, outlier channels, and what could not be measured."""
    facts = {}
    for run in records.runs:
        texts = []
        for line in run.payload("advice"):
            both = (line["finding"], line["advice"])
            words = " ".join(f"{one[:1].upper()}{one[1:]}." for one in both)
            side = "at most" if line["value"] <= line["threshold"] else "at least"
            support = f"{line['metric']} {style.number(line['value'])}: {side}"
            texts.append(f"{words} [{support} {line['threshold']:g}]")
        texts += [f"Not measured: {line['part']}: {line['reason']}" for line in run.payload("note")]
        if texts:
            facts[run.id] = texts
        if lines := run.payload("channel"):
            title = f"{run.id}: {lines[0]['of']:,} outlier channels, the largest first"
            facts[title] = [
                f"channel {line['channel']}: up to {style.number(line['largest'])} "
                f"({style.number(line['medians'])} × the median) after layer {line['layer']}, in "
                f"{'the first token' if line['tokens'] == 'first' else 'tokens after the first'}; "
                f"an outlier from layer {line['first_layer']} on"
                for line in lines
            ]
    return Facts(facts) if facts else None
