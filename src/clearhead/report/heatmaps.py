"""Heat-maps of the first token's share by layer and head."""

from clearhead.records.runs import Records, ordered_maps
from clearhead.report.charts import heads_map, with_map
from clearhead.report.page import Panel, Scale
from clearhead.report.quantities import SHARE


def largest_share(records: Records) -> float:
    """The largest first-token share of any head: where a colour scale for all models ends."""
    values = (one.value for run in records.runs for one in run.select(SHARE))
    return max((value for value in values if value is not None), default=1.0)


def share_scale(largest: float) -> Scale:
    """The colour scale of `first_token_share`."""
    ticks = tuple(f"{100 * largest * part:.0f} %" for part in (0, 0.5, 1))
    return Scale(name="share of queries", ticks=ticks)


def first_token_share(records: Records, largest: float) -> list[Panel]:
    """One heat-map (layer × head) an arm and map, on one colour scale from 0 to `largest`.

    Heads of different seeds do not correspond, so the first seed is shown and not a mean.
    """
    panels = []
    for arm in records.arms():
        run = records.of(arm)[0]
        for name in ordered_maps({one.dimensions.get("map", "") for one in run.select(SHARE)}):
            cells = {
                (one.dimensions["layer"], one.dimensions["head"]): 100 * one.value
                for one in run.select(SHARE, map=name)
                if {"layer", "head"} <= one.dimensions.keys() and one.value is not None
            }
            if not cells:
                continue
            figure = heads_map(cells, 100 * largest)
            title = with_map(arm, name)
            described = f"first token’s share in {title}"
            panels.append(Panel(title=title, figure=figure, shape="cells", described=described))
    return panels
