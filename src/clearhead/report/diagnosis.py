"""The page of a diagnosis: three numbers, heads and norms; the rest folded below."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from clearhead.records.runs import LOST, Records, Run
from clearhead.report import figures, made, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.comparison import chance
from clearhead.report.figures import Line
from clearhead.report.page import Block, Fold, Notes, Page, Panel, Section, section
from clearhead.report.pivots import Pivot
from clearhead.report.quantities import Quantity, by_arm

SAMPLED = (
    "Every number is over all queries, heads and tokens read, but for what is named as sampled: "
    "the median (one number in 8, one query in 16), the effective rank (4 texts) and the order "
    "with content held (64 pairs a text and layer)."
)
FIRST = (
    "The share of a head’s queries (in %) whose largest weight is on the first token; and the norm "
    "of the hidden states, first token and others apart."
)
# The findings of the advice that a repair without training removes.
SINK, MASSIVE = "first_token_argmax_share", "hidden_top_1 / hidden_median"
REPAIRED = ("Clearhead", "Llama", "Mistral", "Qwen2", "Qwen3")  # families that it reads
CHANNELS = "outlier_channels"
RANKS = ("top 1", "top 2", "top 3", "top 10", "top 100", "median")
KURTOSIS, LARGEST, ORDER = "Kurtosis of the hidden states", "Largest magnitudes", "Order"
CACHE = "Keys and values"
GAINS, STREAM = "Values and projections W = α W_init + β ΔW", "Stream, after the last layer"
# Group, title, metric, how it is read, and its unit or note. "map": a number for each attention
# map. "first" and "last": that layer's; "layer": by layer alone. "rest" and "start": of these
# tokens. "%": in per cent. Whatever is recorded by layer has a chart, "log" on a log scale.
NUMBERS = (
    ("Attention", "largest weight on the first token", SINK, "map %", "of (query, head) pairs"),
    ("Attention", "weight on the first token", "first_token_mass", "map %", ""),
    ("Attention", "sink rate at 0.3", "sink_rate_0.3", "map %", "of (text, head) pairs"),
    ("Attention", "weight on no key", "null_mass", "map %", ""),
    ("Attention", "weight on learned keys and values", "prefix_mass", "map %", ""),
    ("Attention", "entropy", "entropy", "map", "nats"),
    ("Attention", "largest weight by chance", "chance_floor", "%", "on the first token"),
    ("Attention", "entropy of equal weights", "entropy_ceiling", "", "nats"),
    ("Attention", "λ, first layer", "lambda", "first", ""),
    ("Attention", "λ, last layer", "lambda", "last", ""),
    (KURTOSIS, "kurtosis of the first token", "kurtosis", "start log", "3 for a Gaussian"),
    (KURTOSIS, "kurtosis of other tokens", "kurtosis", "rest log", "3 for a Gaussian"),
    (KURTOSIS, "excess over all tokens", "kurtosis_excess", "", "0 for a Gaussian"),
    (LARGEST, "mean of the largest |x|, first token", "largest_activation", "layer start log", ""),
    (LARGEST, "mean of the largest |x|, others", "largest_activation", "layer rest log", ""),
    *(
        (LARGEST, f"{words}, {rank}", f"{kind}_{rank.replace(' ', '_')}", "log", "")
        for kind, words in (("hidden", "hidden states"), ("logit", "attention logits"))
        for rank in RANKS
    ),
    (LARGEST, "outlier channels", CHANNELS, "", "at least 30 × the layer’s median"),
    (LARGEST, "hidden states that are not finite", "non_finite_tokens", "", ""),
    (LARGEST, "rows of logits that are not finite", "non_finite_rows", "", ""),
    *(
        (CACHE, f"largest {sign}, {words}", f"largest_{kind}", f"{part} log", "")
        for kind, sign in (("key", "|k|"), ("value", "|v|"))
        for part, words in (
            ("start", "first token"),
            ("rest", "others"),
            ("prefix", "learned keys of a prefix"),
        )
    ),
    (ORDER, "rotary pairs in the anomalous zone", "anomalous_before", "%", "of earlier keys"),
    (ORDER, "rotary pairs, of later keys", "anomalous_after", "%", ""),
    (ORDER, "rotary pairs, by amplitude", "anomalous_weight_before", "%", ""),
    (ORDER, "keys that score lower when moved nearer", "order_broken_content", "%", "sampled"),
    (GAINS, "|β/α| of values, first layer", "beta_over_alpha_values", "first", ""),
    (GAINS, "|β/α| of all others, mean", "beta_over_alpha", "", ""),
    (GAINS, "|β/α| of projections", "beta_over_alpha_projections", "layer", ""),
    (STREAM, "token similarity", "similarity", "last", "mean cosine"),
    (STREAM, "effective rank", "effective_rank", "last", "first 4 texts"),
    (STREAM, "without first tokens", "effective_rank_without_first", "last", "effective rank"),
    (STREAM, "norm of the first token", "norm_first", "last log", ""),
    (STREAM, "norm of the others", "norm_rest", "last log", ""),
)


def page(records: Records, title: str) -> Page:
    """The page of one model, or of several side by side."""
    built = Page(
        title=title,
        kicker="clearhead diagnose",
        records=records,
        judge=lambda threshold: _verdict(records),
        next=tuple(filter(None, (_next(records.of(arm)[0]) for arm in records.arms()))),
    )
    looks = built.looks
    three = [by_arm(records, "three numbers", THREE, corner="", arms_across=True)]
    compared = section("comparison", "", three, title="Three numbers")
    return built.with_sections(
        compared if len(records.arms()) > 1 else None,
        section("first", "", _first(records, looks), title="Heads and layers", caption=FIRST),
        _findings(records),
        section("layers", "", _by_layer(records, looks), title="By layer", folded=True),
        section("numbers", "", [numbers(records)], title="All the numbers", folded=True),
        made.section(records, SAMPLED),
    )


def _first(records: Records, looks: Looks) -> Iterator[Block | None]:
    """The map of heads beside the norms by layer."""
    largest = max(0.1, figures.largest_share(records))
    heads = figures.first_token_share(records, largest)
    if len(heads) == 1:  # of one model, without a name over it
        heads[0].shape = "curve"
        heads[0].title = "Queries that look most at the first token, by head"
    yield figures.share_scale(largest) if heads else None
    yield from heads
    lines = [Line("norm_first", "first token"), Line("norm_rest", "other tokens")]
    yield figures.by_layer(records, looks, "Norm of the stream by layer", "√Σx²", lines, log=True)


def numbers(records: Records) -> Pivot | None:
    """A row a number, a column a model."""
    return by_arm(records, "all numbers", _quantities(records), corner="", arms_across=True)


def _quantities(records: Records) -> Iterator[Quantity]:
    for group, title, metric, words, note in NUMBERS:
        how = words.split()
        for line in _lines(records, metric, how) if "layer" not in how else ():
            named = f"{title}, {line.name}" if line.name else title
            ends = [{"layer": end} for end in ("first", "last") if end in how]
            at = {**line.dimensions, **(ends[0] if ends else {})}
            write = style.percent if "%" in how else None
            yield Quantity(named, group, note, metric=metric, at=at, write=write)


def _lines(records: Records, metric: str, how: Sequence[str]) -> list[Line]:
    """A metric of each attention map, of the first token or of others, or once."""
    if "map" in how:
        maps = records.dimension(SINK, "map")
        return [Line(metric, "" if one == "softmax" else one, {"map": one}) for one in maps]
    parts = {"start": "first", "rest": "rest", "prefix": "prefix"}
    tokens = next((name for word, name in parts.items() if word in how), None)
    return [Line(metric, dimensions={"tokens": tokens} if tokens else {})]


def _by_layer(records: Records, looks: Looks) -> Iterator[Panel | None]:
    drawn = set()
    for group, title, metric, words, note in NUMBERS:
        lines, log = _lines(records, metric, words.split()), "log" in words
        measured = (one for run in records.runs for one in run.select(metric))
        if any("layer" in one.dimensions for one in measured) and str(lines) not in drawn:
            drawn.add(str(lines))
            yield figures.by_layer(records, looks, title, note or group, lines, log=log)


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
        at={"layer": "last"},
    ),
)


def _verdict(records: Records) -> list[str]:
    """The three numbers, those of several models in a table below; and whether any is a defect."""
    sentences = (
        ("{} of queries look most at the first token", "sink", style.percent, chance(records)),
        ("Largest hidden number: {} × the median", "outlier", style.number, ""),
        ("Mean cosine of tokens after the last layer: {}", "similarity", "{:.2f}".format, ""),
    )
    what, said = "Queries that look most at the first token", []
    for words, metric, write, floor in sentences:
        number = Quantity("", metric=metric, at={"layer": "last"}, write=write)
        said.append(narrative.answer(records, what, number, alone=words, more=floor))
    said = [one for one in said[: 3 if len(records.arms()) == 1 else 1] if one]
    if not said:
        return [f"No sink, outlier or similarity was measured of {narrative.title_of(records)}."]
    lost = [run.arm for run in records.runs if any(map(run.value, LOST))]
    sound = [run.arm for run in records.runs if run.arm not in lost and not _symptoms(run)]
    if lost:
        said.insert(0, f"Not finite: hidden states or logits{_where(lost, records)}.")
    if sound:
        said.append(f"No sink, no massive activations{_where(sound, records)}.")
    return [" ".join(said)]


def _where(arms: list[str], records: Records) -> str:
    return "" if len(arms) == len(records.runs) else f" in {narrative.enumerate_words(arms)}"


def _symptoms(run: Run) -> set[str]:
    """Those of `SINK` and `MASSIVE` that the diagnosis gives advice on."""
    return {line["metric"] for line in run.payload("advice")} & {SINK, MASSIVE}


def _next(run: Run) -> str:
    """The command that takes massive activations, or only a sink, away; "" where it does not."""
    own_null = bool(run.select("null_mass") or run.select("prefix_mass"))
    language = str(run.header.get("architecture", "")).removesuffix("ForCausalLM") in REPAIRED
    symptoms = _symptoms(run)
    if own_null or not language or run.id.startswith("init:") or not symptoms:
        return ""
    turned = " --rotate residual values down" if MASSIVE in symptoms else ""
    return f"clearhead convert {shlex.quote(run.id)} repaired --prefix '\\n'{turned}"


def _findings(records: Records) -> Section | None:
    """Advice with its support, outlier channels, and what could not be measured."""
    blocks: list[Block] = []
    for run in records.runs:
        texts = []
        for line in run.payload("advice"):
            side = "at most" if line["value"] <= line["threshold"] else "at least"
            support = (
                f"{line['metric']} {style.number(line['value'])}: {side} {line['threshold']:g}"
            )
            texts.append(f"{_sentence(line['finding'])} {_sentence(line['advice'])} [{support}]")
        texts += [f"Not measured: {line['part']}: {line['reason']}" for line in run.payload("note")]
        blocks += [Notes(title=run.id, texts=tuple(texts))] if texts else []
        if lines := run.payload("channel"):
            words = f"{run.id}: {lines[0]['of']:,} outlier channels, the largest first"
            blocks.append(Fold(summary=words, text="\n".join(map(_channel, lines))))
        if places := tuple(_largest_of_cache(run)):
            words = f"{run.id}: the largest keys and values, by layer"
            blocks.append(Fold(summary=words, text="\n".join(places)))
    title = "What was found, and what to do"
    if not blocks:
        return None
    return Section(name="findings", title=title, blocks=tuple(blocks), folded=True)


def _largest_of_cache(run: Run) -> Iterator[str]:
    """A line a layer: the largest key and value of each part of the text, and where it is."""
    by_layer: dict[int, list[str]] = {}
    for kind in ("key", "value"):
        for one in run.select(f"largest_{kind}"):
            if one.value is not None and "layer" in one.dimensions:
                part = {"first": "at the first token", "rest": "elsewhere", "prefix": "learned"}
                by_layer.setdefault(one.dimensions["layer"], []).append(
                    f"{kind} {part.get(one.dimensions['tokens'], '')} {style.number(one.value)} "
                    f"({one.details.get('where', '')})"
                )
    for layer, said in sorted(by_layer.items()):
        yield f"layer {layer}: {'; '.join(said)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _channel(line: dict[str, Any]) -> str:
    where = "the first token" if line["tokens"] == "first" else "tokens after the first"
    largest, medians = (style.number(line[name]) for name in ("largest", "medians"))
    return (
        f"channel {line['channel']}: up to {largest} ({medians} × the median) after layer "
        f"{line['layer']}, in {where}; an outlier from layer {line['first_layer']} on"
    )
