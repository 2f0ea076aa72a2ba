"""The page of a diagnosis: three numbers, heads and norms; all other numbers folded below."""

import math
import shlex
from collections.abc import Iterator
from typing import Any

from clearhead.records.runs import LOST, Measure, Records, Run
from clearhead.report import figures, heatmaps, made, narrative, style
from clearhead.report.charts import Curves, Looks, Point, chart, points_of
from clearhead.report.comparison import chance
from clearhead.report.figures import Line
from clearhead.report.page import (
    Block,
    Fold,
    Notes,
    Page,
    Panel,
    Section,
    Title,
    declared,
    section,
)
from clearhead.report.pivots import (
    Pivot,
    Quantity,
    Read,
    along,
    at,
    at_end,
    by_arm,
    summary,
)

CHANNELS = "outlier_channels"
SAMPLED = (
    "Every number is over all queries, heads and tokens read, but for what is named as sampled: "
    "the median (one number in 8, one query in 16), the effective rank (4 texts) and the order "
    "with content held (64 pairs a text and layer)."
)
DISTINCT = (
    "Every number by a definition of its own name; those of one kind do not compare across "
    "definitions."
)


def page(records: Records, title: str) -> Page:
    """The page of one model, or of several side by side."""
    built = Page(
        title=title,
        kicker="clearhead diagnose",
        records=records,
        judge=lambda threshold: _verdict(records),
        next=tuple(dict.fromkeys(filter(None, map(_next, records.runs)))),
        warnings=narrative.warnings(records),
    )
    held = max((run.header.get("probes_hold_bytes") or 0 for run in records.runs), default=0)
    beside = Notes(texts=(f"The probes held at most {held / 2**20:,.0f} MiB beside a model.",))
    three = [by_arm(records, "three numbers", THREE, corner="", arms_across=True)]
    return built.with_sections(
        section("diagnosis.comparison", "", three) if len(records.arms()) > 1 else None,
        section("diagnosis.first", "", _first_screen(records, built.looks)),
        _findings(records),
        *(_section(records, built.looks, one) for one in declared("diagnosis")["sections"]),
        section("diagnosis.numbers", DISTINCT, [numbers(records), beside if held else None]),
        made.section(records, SAMPLED),
    )


def _first_screen(records: Records, looks: Looks) -> list[Block | None]:
    """The map of heads beside the norms by layer."""
    largest = max(0.1, heatmaps.largest_share(records))
    heads = heatmaps.first_token_share(records, largest)
    lines = [Line("norm_first", "first token"), Line("norm_rest", "other tokens")]
    norms = figures.by_layer(records, looks, "Norm of the stream by layer", "√Σx²", lines, log=True)
    if len(heads) == 1:  # of one model, without a name over it
        heads[0].shape = "curve"
        heads[0].title = "Queries that look most at the first token, by head"
    return [heatmaps.share_scale(largest) if heads else None, *heads, norms]


def numbers(records: Records) -> Pivot | None:
    """A row a number, a column a model."""
    return by_arm(records, "all numbers", _quantities(records), corner="", arms_across=True)


def _quantities(records: Records) -> Iterator[Quantity]:
    maps = records.dimension(heatmaps.SHARE, "map")
    for group, title, metric, note, of in declared("diagnosis")["numbers"]:
        for name in maps if "map" in of else (None,):
            words = title if name in (None, "softmax") else f"{title}, {name}"
            tokens = {"first token": "first", "other tokens": "rest"}
            read: Read = at(metric, map=name, tokens=next(filter(None, map(tokens.get, of)), None))
            if metric == CHANNELS:
                read = _channel_count
            elif "last" in of or "first" in of:
                read = at_end(metric, first="first" in of)
            write = style.percent if "%" in of else None
            yield Quantity(words, group, note, read=read, write=write)


def _channel_count(run: Run) -> list[Measure]:
    """The number of outlier channels; 0 only where hidden states were measured."""
    lines = run.payload("channel")
    if not lines and run.measure("hidden_top_1") is None:
        return []
    return [Measure(metric=CHANNELS, value=float(lines[0]["of"] if lines else 0))]


def outlier(run: Run) -> list[Measure]:
    """The largest hidden number in medians."""
    top, median = run.value("hidden_top_1"), run.value("hidden_median")
    return [Measure(metric="outlier", value=top / median)] if top is not None and median else []


THREE = (
    Quantity(
        "queries whose largest weight is on the first token",
        note="sink",
        by_map=heatmaps.SHARE,
        write=style.percent,
    ),
    Quantity("largest hidden number, in medians", note="outliers", read=outlier),
    Quantity(
        "similarity of tokens after the last layer",
        note="mean cosine; 1 is rank collapse",
        read=at_end("similarity"),
    ),
)


def _verdict(records: Records) -> list[str]:
    """The three numbers, those of several models in a table below; and whether any is a defect."""
    sentences = (
        ("{} of queries look most at the first token", heatmaps.share_of_queries, style.percent),
        ("Largest hidden number: {} × the median", outlier, style.number),
        ("Mean cosine of tokens after the last layer: {}", at_end("similarity"), "{:.2f}".format),
    )
    what, floors = "Queries that look most at the first token", [chance(records), "", ""]
    said = [
        narrative.answer(records, what, read, write, alone=words, more=floor)
        for (words, read, write), floor in zip(sentences, floors, strict=True)
    ]
    said = [one for one in said[: 3 if len(records.arms()) == 1 else 1] if one]
    if not said:
        return [f"No sink, outlier or similarity was measured of {narrative.title_of(records)}."]
    lost = [run.arm for run in records.runs if any(map(run.value, LOST))]
    sound = [
        run.arm
        for run in records.runs
        if run.arm not in lost and not _has_sink(run) and not _is_massive(run)
    ]
    if lost:
        said.insert(0, f"Not finite: hidden states or logits{_where(lost, records)}.")
    if sound:
        said.append(f"No sink, no massive activations{_where(sound, records)}.")
    return [" ".join(said)]


def _where(arms: list[str], records: Records) -> str:
    return "" if len(arms) == len(records.runs) else f" in {narrative.enumerate_words(arms)}"


def _has_sink(run: Run) -> bool:
    """True if at least 30 % of all queries look most at the first token, and 5 times chance."""
    shares = [run.value(heatmaps.SHARE, map=name) for name in ("softmax", "difference")]
    share = next((one for one in shares if one is not None), 0.0)
    return share >= max(0.3, 5 * (run.value("chance_floor") or 0.0))


def _is_massive(run: Run) -> bool:
    """True if the largest hidden number is at least 1,000 medians."""
    return any((one.value or 0.0) >= 1000 for one in outlier(run))


def _next(run: Run) -> str:
    """The command that takes massive activations, or only a sink, away; "" where it does not."""
    own_null = bool(run.select("null_mass") or run.select("prefix_mass"))
    language = str(run.header.get("architecture", "")).endswith("ForCausalLM")
    symptoms = _has_sink(run) or _is_massive(run)
    if own_null or not language or run.id.startswith("init:") or not symptoms:
        return ""
    turned = " --rotate residual values down" if _is_massive(run) else ""
    return f"clearhead convert {shlex.quote(run.id)} repaired --prefix '\\n'{turned}"


def _findings(records: Records) -> Section | None:
    """Advice with its support, and what could not be measured."""
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
        blocks += [Title(text=run.id), Notes(texts=tuple(texts))] if texts else []
    words = declared("sections")["diagnosis"]["findings"]
    return Section(name="findings", answer="", blocks=tuple(blocks), **words) if blocks else None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _section(records: Records, looks: Looks, spec: dict[str, Any]) -> Section | None:
    """A section as declared, with the figures that only it has."""
    name, blocks, answer = spec["name"], list[Block | None](), ""
    for one in spec["charts"]:
        if "of_layers" in one:
            blocks += (_of_layers(run, one) for run in records.runs)
        else:
            draw = _recorded if "curve" in one else _by_layer
            blocks.append(draw(records, looks, one))
    if name == "attention":
        blocks.append(_null_mass(records, looks))
    elif name == "hidden":
        blocks.append(_ranks(records, looks, "hidden", "Hidden states by magnitude"))
        blocks.append(_ranks(records, looks, "logit", "Attention logits by magnitude"))
        blocks += _channels(records)
    elif name == "order":
        what = "Queries whose nearest keys score lower than farther ones"
        answer = narrative.answer(records, what, at("order_broken_before"), style.percent)
    words = {"title": spec["title"], "caption": spec["caption"], "folded": True}
    return section(f"diagnosis.{name}", answer, blocks, **words)


def _by_layer(records: Records, looks: Looks, spec: dict[str, Any]) -> Panel | None:
    lines = [
        Line(metric=metric, name=name, dimensions={"tokens": tokens[0]} if tokens else {})
        for metric, name, *tokens in spec.get("lines", ())
    ]
    for name in records.dimension(heatmaps.SHARE, "map") if "by_map" in spec else ():
        shown = "" if name == "softmax" else name
        lines.append(Line(metric=spec["by_map"], name=shown, dimensions={"map": name}))
    words = {"log": spec.get("log", False), "note": spec.get("note", "")}
    return figures.by_layer(records, looks, spec["title"], spec["axis"], lines, **words)


def _recorded(records: Records, looks: Looks, spec: dict[str, Any]) -> Panel | None:
    """A recorded curve of each model's first seed, whose places others do not share: by map."""
    curves: Curves = {}
    for arm in records.arms():
        run = records.of(arm)[0]
        lines = {one["map"]: one for one in run.payload("curve", curve=spec["curve"], layer=None)}
        shown = {"difference": lines["difference"]} if "difference" in lines else lines
        for name, one in shown.items():
            curves[arm, name] = [(f"{x}", y, None) for x, y, _ in _points(one, spec)]
    names = max(([x for x, *_ in points] for points in curves.values()), key=len, default=[])
    axes, up = (spec["x"], spec["axis"]), spec.get("up", "")
    return chart(spec["title"], curves, looks, *axes, across=names, up=up, note=spec["note"])


def _of_layers(run: Run, spec: dict[str, Any]) -> Panel | None:
    """A recorded curve of a run, a line a layer, or one for the first layer at W_Q = 0."""
    lines = {
        f"layer {one['layer']}" if "layer" in one else "C: the first layer at W_Q = 0": one
        for one in run.payload("curve", curve=spec["of_layers"])
    }
    trained = run.value("trained_length") if "position" in spec["x"] else None
    return chart(
        f"{spec['title']}: {run.id}",
        {(name, ""): _points(one, spec) for name, one in lines.items()},
        style.looks([*lines]),
        spec["x"],
        spec["axis"],
        up=spec.get("up", ""),
        size=0,
        note=spec.get("note", ""),
        mark=None if trained is None else (trained, "training length"),
        own_legend=True,
    )


def _points(one: dict[str, Any], spec: dict[str, Any]) -> list[Point]:
    least = spec.get("above", -math.inf)
    pairs = zip(one["x"], one["y"], strict=True)
    return [(x, y, None) for x, y in pairs if y is not None and y > least]


def _null_mass(records: Records, looks: Looks) -> Panel | None:
    """The weight on no key by the query's position; of gates, how far they are closed."""
    curves: Curves = {}
    bands: set[int] = set()
    for arm in records.arms():
        for metric, kind in (("null_mass", "no key"), ("gate_closed", "gate")):
            for name in records.dimension(metric, "map", arm):
                found = along(records, arm, metric, "position", map=name)
                points = points_of({_band(low): one for low, one in found.items()})
                curves[arm, kind if name in ("softmax", "gate") else f"{kind}, {name}"] = points
                bands |= found.keys()
    return chart(
        "Weight on no key, by position",
        curves,
        looks,
        "position of the query (tokens)",
        "mean weight",
        across=[_band(low) for low in sorted(bands)],
        up="zero",
        note="All layers and heads. Of a gate, one minus its mean over channels.",
    )


def _band(low: int) -> str:
    """The positions of a band: 0, 1, 2–3, 4–7."""
    return str(low) if low < 2 else f"{low}–{2 * low - 1}"


def _ranks(records: Records, looks: Looks, kind: str, title: str) -> Panel | None:
    """The largest magnitudes by rank, and the median; `kind` is "hidden" or "logit"."""
    places = {place: f"{kind}_top_{place}" for place in ("1", "2", "3", "10", "100")}
    places["median"] = f"{kind}_median"
    curves: Curves = {
        (arm, ""): points_of({x: summary(records, arm, metric) for x, metric in places.items()})
        for arm in records.arms()
    }
    return chart(title, curves, looks, "rank", "magnitude", across=[*places], up="auto")


def _channels(records: Records) -> Iterator[Block]:
    for run in records.runs:
        lines = run.payload("channel")
        if lines:
            summary = f"{run.id}: {lines[0]['of']:,} outlier channels, the largest first"
            yield Fold(summary=summary, lines=tuple(map(_channel, lines)))
        elif _channel_count(run):
            yield Notes(texts=(f"{run.id}: no channel reaches 30 × its layer’s median.",))


def _channel(line: dict[str, Any]) -> str:
    return (
        f"channel {line['channel']}: up to {style.number(line['largest'])} "
        f"({style.number(line['medians'])} × the median) after {_layer(line['layer'])}, "
        f"in {'the first token' if line['tokens'] == 'first' else 'tokens after the first'}; "
        f"an outlier from {_layer(line['first_layer'])} on"
    )


def _layer(layer: int) -> str:
    return "the embeddings" if layer < 0 else f"layer {layer}"
