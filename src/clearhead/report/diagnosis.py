"""The page of a diagnosis: three numbers of each model, and all others folded below."""

from collections.abc import Iterable, Iterator
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report import diagnosis_figures as drawn
from clearhead.report import figures, heatmaps, made, narrative, style
from clearhead.report.charts import Looks
from clearhead.report.figures import Line
from clearhead.report.page import (
    Block,
    Finding,
    Fold,
    Notes,
    Page,
    Panel,
    Panels,
    Section,
    declared,
    section,
    titled,
)
from clearhead.report.pivots import Heading, Pivot, Quantity, Read, at, at_end, by_arm

CHANNELS = "outlier_channels"
FACTS = (
    *("command", "architecture", "parameters", "device", "dtype", "versions", "windows"),
    *("length", "seconds", "peak_memory_bytes", "probes_hold_bytes", "data", "date"),
)
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
        warnings=narrative.warnings(records),
        findings=[found for run in records.runs if (found := _finding(run)).paragraphs],
    )
    held = max((run.header.get("probes_hold_bytes") or 0 for run in records.runs), default=0)
    beside = f"The probes held at most {held / 2**20:,.0f} MiB beside a model."
    return built.with_sections(
        section(
            "diagnosis.comparison",
            "A sink, outliers and rank collapse are what the repairs are about.",
            [by_arm(records, "three numbers", _three(), corner="", arms_across=True)],
        ),
        *(_section(records, built.looks, one) for one in declared("diagnosis")["sections"]),
        section(
            "diagnosis.numbers",
            "Every number by a definition of its own name; those of one kind do not compare across "
            "definitions.",
            [numbers(records), Notes(texts=(beside,)) if held else None],
        ),
        made.section(records, made.of_header(*FACTS), SAMPLED),
    )


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
    """The three numbers in two sentences."""
    sentences = [narrative.sinks(records), _largest(records), _alike(records)]
    said = [sentence for sentence in sentences if sentence]
    if not said:
        return [f"No sink, outlier or similarity was measured of {narrative.title_of(records)}."]
    if text := narrative.text_in_words(records):
        said[-1] += f" All of it{text}."
    return [" ".join(said[:-1]), said[-1]] if len(said) > 1 else said


def _largest(records: Records) -> str:
    found = _means(records, outlier)
    said = narrative.listed(found, lambda value: f"{style.number(value)} medians", "in")
    return f"The largest hidden number is {said}." if found else ""


def _alike(records: Records) -> str:
    found = _means(records, at_end("similarity"))
    said = narrative.listed(found, lambda value: f"{value:.2f}", "in")
    return f"After the last layer the mean cosine between tokens is {said}." if found else ""


def _means(records: Records, read: Read) -> dict[str, float]:
    found = {}
    for arm in records.arms():
        values = [one.value for run in records.of(arm) for one in read(run)]
        given = [value for value in values if value is not None]
        if given:
            found[arm] = sum(given) / len(given)
    return found


def _finding(run: Run) -> Finding:
    """Advice with its support, and what could not be measured."""
    paragraphs = [
        (f"{_sentence(line['finding'])} {_sentence(line['advice'])}", _support(line))
        for line in run.payload("advice")
    ]
    paragraphs += [
        (f"Not measured: {line['part']}: {line['reason']}", "") for line in run.payload("note")
    ]
    return Finding(title=run.id, paragraphs=tuple(paragraphs))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _support(line: dict[str, Any]) -> str:
    """The number that a piece of advice rests on, and the threshold that it passed."""
    side = "at most" if line["value"] <= line["threshold"] else "at least"
    return f"{line['metric']} {style.number(line['value'])}: {side} {line['threshold']:g}"


def _section(records: Records, looks: Looks, spec: dict[str, Any]) -> Section | None:
    """A section as declared, with the figures that only it has."""
    name = spec["name"]
    before: list[Block] = []
    after: list[Block] = []
    more: Iterable[Panel | None] = ()
    answer = ""
    if name == "attention":
        answer, before = narrative.sinks(records), _heads(records)
        more = [drawn.distances(records, looks), drawn.null_mass(records, looks)]
    elif name == "hidden":
        answer, after = _largest(records), list(_channels(records))
        ranked = (("hidden", "Hidden states"), ("logit", "Attention logits"))
        more = [drawn.ranks(records, looks, kind, f"{of} by magnitude") for kind, of in ranked]
    elif name == "order":
        what = "Queries whose nearest keys score lower than farther ones"
        answer = narrative.answer(records, what, "order_broken_before", style.percent)
        more = [drawn.decay(records, looks)]
    elif name == "stream":
        answer = _alike(records)
        more = [drawn.spectrum(run) for run in records.runs]
    elif name == "longer":
        answer = "One text longer than those of the training was read."
        more = drawn.beyond(records)
    charts = [_chart(records, looks, chart) for chart in spec.get("charts", ())]
    panels = tuple(panel for panel in (*charts, *more) if panel is not None)
    blocks = [*before, *([Panels(panels=panels)] if panels else []), *after]
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


def _heads(records: Records) -> list[Block]:
    largest = max(0.1, heatmaps.largest_share(records))
    panels = tuple(heatmaps.first_token_share(records, largest))
    return [heatmaps.share_scale(largest), Panels(panels=panels, shape="cells")] if panels else []


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
