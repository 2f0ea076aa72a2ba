"""Figures of a diagnosis besides those by layer: by distance, by rank and by position."""

from typing import Any

from clearhead.records.runs import Records, Run
from clearhead.report import style
from clearhead.report.charts import (
    Looks,
    categories,
    line,
    log_axis,
    mark_length,
    new,
    note_on_bars,
    points_of,
    scale_axis,
    with_map,
)
from clearhead.report.page import Panel
from clearhead.report.pivots import along, summary


def distances(records: Records, looks: Looks) -> Panel | None:
    """The share of attention by distance, over all layers."""
    figure = new("distance from the query (tokens)", "share of the weight")
    longest: list[str] = []
    for run in _first_seeds(records):
        whole = run.payload("curve", curve="share_by_distance", layer=None)
        names = {one["map"] for one in whole}
        for one in whole:
            if "difference" in names and one["map"] != "difference":
                continue
            name = with_map(run.arm, one["map"])
            line(figure, name, _points(one["x"], one["y"]), looks[run.arm], size=7)
            longest = max(longest, one["x"], key=len)
    if not longest:
        return None
    categories(figure, longest)
    return Panel(
        title="How far attention reaches",
        figure=figure,
        note="All layers, heads and queries. Of a signed difference, the signed weight.",
    )


def null_mass(records: Records, looks: Looks) -> Panel | None:
    """The weight on no key by the query's position; of gates, how far they are closed."""
    figure = new("position of the query (tokens)", "mean weight")
    bands: set[int] = set()
    for arm in records.arms():
        for metric, dash in (("null_mass", "solid"), ("gate_closed", "dot")):
            for name in records.dimension(metric, "map", arm):
                found = along(records, arm, metric, "position", map=name)
                points = points_of({_band(low): one for low, one in found.items()})
                line(figure, with_map(arm, name), points, looks[arm], dash=dash, size=7)
                bands |= found.keys()
    if not bands:
        return None
    categories(figure, [_band(low) for low in sorted(bands)])
    figure.update_yaxes(rangemode="nonnegative")
    return Panel(
        title="Weight on no key, by position",
        figure=figure,
        note="All layers and heads. Of a gate, one minus its mean over channels. "
        f"{note_on_bars(figure)}".rstrip(),
    )


def _band(low: int) -> str:
    """The positions of a band: 0, 1, 2–3, 4–7."""
    return str(low) if low < 2 else f"{low}–{2 * low - 1}"


def ranks(records: Records, looks: Looks, kind: str, title: str) -> Panel | None:
    """The largest magnitudes by rank, and the median; `kind` is "hidden" or "logit"."""
    figure = new("rank", "magnitude")
    places = {place: f"{kind}_top_{place}" for place in ("1", "2", "3", "10", "100")}
    places["median"] = f"{kind}_median"
    shown: list[float] = []
    for arm in records.arms():
        found = {place: summary(records, arm, metric) for place, metric in places.items()}
        points = points_of(found)
        line(figure, arm, points, looks[arm], size=7)
        shown += [value for _, value, _ in points if value]
    if not shown:
        return None
    categories(figure, list(places))
    scale_axis(figure, "magnitude", shown)
    return Panel(title=title, figure=figure)


def decay(records: Records, looks: Looks) -> Panel | None:
    """The mean |score| of sampled pairs by distance, the content held, and its bound."""
    figure = new("distance (tokens)", "score")
    shown: list[float] = []
    places: list[str] = []
    for run in _first_seeds(records):
        for one in run.payload("curve", curve="decay"):
            dash = "dot" if one["map"] == "bound" else "solid"
            names = [f"{x:,}" for x in one["x"]]
            name = f"{run.arm} · {one['map']}"
            line(figure, name, _points(names, one["y"]), looks[run.arm], dash=dash, size=7)
            shown += [y for y in one["y"] if y]
            places = max(places, names, key=len)
    if not shown:
        return None
    categories(figure, places)
    log_axis(figure, "score", shown)
    return Panel(
        title="Long-range decay against its bound",
        figure=figure,
        note="Sampled queries and keys, their content held and only the distance changed.",
    )


def beyond(records: Records) -> list[Panel | None]:
    """Logits by position, of each model."""
    return [
        positions(run, curve, title, axis)
        for curve, title, axis in (
            ("largest_logit_by_position", "Largest logit by the query’s position", "|logit|"),
            ("logit_by_position", "Logits of the last queries, by key", "mean logit"),
        )
        for run in records.runs
    ]


def positions(run: Run, curve: str, title: str, axis: str) -> Panel | None:
    """A curve by position beyond the training length: low layers against the last."""
    lines = run.payload("curve", curve=curve)
    if not lines:
        return None
    figure = new("position in the text (tokens)", axis)
    looks = style.looks([f"layer {one['layer']}" for one in lines])
    last = max(one["layer"] for one in lines)
    for one in lines:
        name = f"layer {one['layer']}"
        full = f"{name} (the last)" if one["layer"] == last else name
        dash = "solid" if one["layer"] == last else "dot"
        line(figure, full, _points(one["x"], one["y"]), looks[name], dash=dash, size=0)
    trained = run.value("trained_length")
    if trained is not None:
        mark_length(figure, trained, "training length", at=trained)
    return Panel(title=f"{title}: {run.id}", figure=figure, own_legend=True)


def spectrum(run: Run) -> Panel | None:
    """Singular values of attention's matrix: low layers against the last, and the first's C."""
    lines = run.payload("curve", curve="spectrum")
    if not lines:
        return None
    figure = new("number", "singular value")
    looks = style.looks([f"layer {one['layer']}" for one in lines if "layer" in one])
    shown: list[float] = []
    for one in lines:
        name = f"layer {one['layer']}" if "layer" in one else "C: the first layer at W_Q = 0"
        look = looks.get(name) or next(iter(looks.values()))
        points = _points(one["x"], [y if y > 1e-6 else None for y in one["y"]])
        line(figure, name, points, look, dash="solid" if "layer" in one else "dot", size=0)
        shown += [y for y in one["y"] if y > 1e-6]
    log_axis(figure, "singular value", shown)
    return Panel(
        title=f"Spectrum of attention: {run.id}",
        figure=figure,
        note="Mean over heads, first tokens of one text. The flatter, the more directions survive.",
        own_legend=True,
    )


def _first_seeds(records: Records) -> list[Run]:
    """A run an arm: curves of different seeds have no points in common."""
    return [records.of(arm)[0] for arm in records.arms()]


def _points(x: list[Any], y: list[Any]) -> list[Any]:
    return [(place, value, None) for place, value in zip(x, y, strict=True)]
