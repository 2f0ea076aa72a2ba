"""The page of a diagnosis: three numbers, heads and norms; all other numbers folded below."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report import diagnosis_figures as drawn
from clearhead.report import figures, heatmaps, made, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.figures import Line
from clearhead.report.page import (
    Block,
    Fold,
    Notes,
    Page,
    Panel,
    Panels,
    Section,
    Title,
    declared,
    section,
    titled,
)
from clearhead.report.pivots import Heading, Pivot, Quantity, Read, at, at_end, by_arm

CHANNELS = "outlier_channels"
SAMPLED = (
    "Every number is over all queries, heads and tokens read, but for what is named as sampled: "
    "the median (one number in 8, one query in 16), the effective rank (4 texts) and the order "
    "with content held (64 pairs a text and layer)."
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
    beside = f"The probes held at most {held / 2**20:,.0f} MiB beside a model."
    three = [by_arm(records, "three numbers", _three(), corner="", arms_across=True)]
    return built.with_sections(
        section("diagnosis.comparison", "", three) if len(records.arms()) > 1 else None,
        section("diagnosis.first", "", _first_screen(records, built.looks)),
        _findings(records),
        *(_section(records, built.looks, one) for one in declared("diagnosis")["sections"]),
        section(
            "diagnosis.numbers",
            "Every number by a definition of its own name; those of one kind do not compare across "
            "definitions.",
            [numbers(records), Notes(texts=(beside,)) if held else None],
        ),
        made.section(records, SAMPLED),
    )


def _first_screen(records: Records, looks: Looks) -> list[Block]:
    """The map of heads beside the norms by layer."""
    largest = max(0.1, heatmaps.largest_share(records))
    heads = heatmaps.first_token_share(records, largest)
    lines = [
        Line(metric="norm_first", name="first token"),
        Line(metric="norm_rest", name="other tokens"),
    ]
    norms = figures.by_layer(records, looks, "Norm of the stream by layer", "√Σx²", lines, log=True)
    curves = (norms,) if norms else ()
    if len(heads) == 1:  # of one model, without a name over it
        heads[0].title = "Queries that look most at the first token, by head"
        curves = (heads.pop(), *curves)
    blocks: list[Block] = [Panels(panels=tuple(heads), shape="cells")] if heads else []
    blocks += [Panels(panels=curves)] if curves else []
    scale = [heatmaps.share_scale(largest)] if largest and (heads or len(curves) > 1) else []
    return [*scale, *blocks]


def numbers(records: Records) -> Pivot | None:
    """A row a number, a column a model."""
    return by_arm(records, "all numbers", _quantities(records), corner="", arms_across=True)


def _quantities(records: Records) -> Iterator[tuple[Heading, Quantity]]:
    maps = records.dimension(heatmaps.SHARE, "map")
    for group, title, metric, note, of in declared("diagnosis")["numbers"]:
        for name in maps if "map" in of else (None,):
            heading = Heading(
                group=group,
                title=title if name in (None, "softmax") else f"{title}, {name}",
                note=note,
            )
            tokens = {"first token": "first", "other tokens": "rest"}
            read: Read = at(metric, map=name, tokens=next(filter(None, map(tokens.get, of)), None))
            if metric == CHANNELS:
                read = _channel_count
            elif "last" in of or "first" in of:
                read = at_end(metric, first="first" in of)
            yield heading, Quantity(read=read, write=style.percent if "%" in of else None)


def _channel_count(run: Run) -> list[Measure]:
    """The number of outlier channels; 0 only where hidden states were measured."""
    lines = run.payload("channel")
    if not lines and run.measure("hidden_top_1") is None:
        return []
    return [Measure(metric=CHANNELS, value=float(lines[0]["of"] if lines else 0))]


def _three() -> Iterator[tuple[Heading, Quantity]]:
    title = "queries whose largest weight is on the first token"
    share = Quantity(by_map=heatmaps.SHARE, write=style.percent)
    yield Heading(title=title, note="sink"), share
    title = "largest hidden number, in medians"
    yield Heading(title=title, note="outliers"), Quantity(read=outlier)
    title = "similarity of tokens after the last layer"
    note = "mean cosine; 1 is rank collapse"
    yield Heading(title=title, note=note), Quantity(read=at_end("similarity"))


def outlier(run: Run) -> list[Measure]:
    """The largest hidden number in medians."""
    top, median = run.value("hidden_top_1"), run.value("hidden_median")
    return [Measure(metric="outlier", value=top / median)] if top is not None and median else []


def _verdict(records: Records) -> list[str]:
    """The three numbers in a sentence each, and whether any calls for a repair."""
    largest, alike = (_means(records, read) for read in (outlier, at_end("similarity")))
    numbers = (
        narrative.sink(records),
        _said("Largest hidden number", largest, lambda x: f"{style.number(x)} × the median"),
        _said("Mean cosine of tokens after the last layer", alike, "{:.2f}".format),
    )
    said = [one for one in numbers if one]
    if len(records.arms()) > 1:  # whose table stands below
        said = said[:1]
    if not said:
        return [f"No sink, outlier or similarity was measured of {narrative.title_of(records)}."]
    sound = [run.arm for run in records.runs if not _has_sink(run) and not _is_massive(run)]
    if len(sound) == len(records.runs):
        said.append("No sink, no massive activations.")
    elif sound:
        said.append(f"No sink, no massive activations in {narrative.enumerate_words(sound)}.")
    return [" ".join(said)]


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


def _said(what: str, found: dict[str, float], write: Callable[[float], str]) -> str:
    """A number of each model; of one without its name."""
    said = narrative.listed(found, write, "in")
    if len(found) == 1:
        said = write(next(iter(found.values())))
    return f"{what}: {said}." if found else ""


def _means(records: Records, read: Read) -> dict[str, float]:
    found = {}
    for arm in records.arms():
        values = [one.value for run in records.of(arm) for one in read(run)]
        given = [value for value in values if value is not None]
        if given:
            found[arm] = sum(given) / len(given)
    return found


def _findings(records: Records) -> Section | None:
    """Advice with its support, and what could not be measured."""
    blocks: list[Block] = []
    for run in records.runs:
        texts = [
            f"{_sentence(line['finding'])} {_sentence(line['advice'])} [{_support(line)}]"
            for line in run.payload("advice")
        ]
        texts += [f"Not measured: {line['part']}: {line['reason']}" for line in run.payload("note")]
        blocks += [Title(text=run.id), Notes(texts=tuple(texts))] if texts else []
    words = declared("sections")["diagnosis"]["findings"]
    return Section(name="findings", answer="", blocks=tuple(blocks), **words) if blocks else None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _support(line: dict[str, Any]) -> str:
    """The number that a piece of advice rests on, and the threshold that it passed."""
    side = "at most" if line["value"] <= line["threshold"] else "at least"
    return f"{line['metric']} {style.number(line['value'])}: {side} {line['threshold']:g}"


def _section(records: Records, looks: Looks, spec: dict[str, Any]) -> Section | None:
    """A section as declared, with the figures that only it has."""
    name = spec["name"]
    after: list[Block] = []
    more: Iterable[Panel | None] = ()
    answer = ""
    if name == "attention":
        more = [drawn.distances(records, looks), drawn.null_mass(records, looks)]
    elif name == "hidden":
        after = list(_channels(records))
        ranked = (("hidden", "Hidden states"), ("logit", "Attention logits"))
        more = [drawn.ranks(records, looks, kind, f"{of} by magnitude") for kind, of in ranked]
    elif name == "order":
        what = "Queries whose nearest keys score lower than farther ones"
        answer = narrative.answer(records, what, "order_broken_before", style.percent)
        more = [drawn.decay(records, looks)]
    elif name == "stream":
        more = [drawn.spectrum(run) for run in records.runs]
    elif name == "longer":
        answer = "One text longer than those of the training was read."
        more = drawn.beyond(records)
    charts = [_chart(records, looks, chart) for chart in spec.get("charts", ())]
    panels = tuple(panel for panel in (*charts, *more) if panel is not None)
    blocks = [*([Panels(panels=panels)] if panels else []), *after]
    words = {key: spec[key] for key in ("title", "caption")}
    return titled(name, answer, blocks, **words, folded=True)


def _chart(records: Records, looks: Looks, spec: dict[str, Any]) -> Panel | None:
    lines = [
        Line(metric=metric, name=name, dimensions={"tokens": tokens[0]} if tokens else {})
        for metric, name, *tokens in spec.get("lines", ())
    ]
    if "by_map" in spec:
        lines += [
            Line(
                metric=spec["by_map"],
                name="" if name == "softmax" else name,
                dimensions={"map": name},
            )
            for name in records.dimension(heatmaps.SHARE, "map")
        ]
    return figures.by_layer(
        records,
        looks,
        spec["title"],
        spec["axis"],
        lines,
        log=spec.get("log", False),
        note=spec.get("note", ""),
    )


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
