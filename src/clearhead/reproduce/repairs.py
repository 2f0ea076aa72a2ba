"""Each repair in a line: what it changes, costs and buys, where that was seen, is it worth it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from clearhead.reproduce.claims import Judged, Pooled
from clearhead.reproduce.contrasts import Judgement

COLUMNS = ("repair", "changes", "costs", "buys", "seen in", "worth it?")
Place = tuple[str, int]  # a claim, and which of its comparisons


class Repair(NamedTuple):
    """A repair, and the comparisons that say its price and its gain."""

    name: str
    changes: str
    costs: Place
    buys: Place


REPAIRS = (
    Repair(
        "prefix and rotation, trained",
        "a token before the text, down projections turned",
        ("retrofit/loss", 0),
        ("retrofit/controls", 0),
    ),
    Repair("ALiBi", "positions", ("together/loss", 3), ("together/extrapolation", 0)),
    Repair("CoCA, exact", "scores", ("coca/exact", 0), ("coca/table1", 1)),
    Repair("SAS-P", "the block", ("sas/table1", 0), ("sas/figure5", 1)),
    Repair("softmax-1", "the normaliser", ("softmax1/loss", 0), ("softmax1/share", 0)),
    Repair("OrthoAdam, shared", "the optimizer", ("together/loss", 5), ("softmax1/kurtosis", 2)),
    Repair("differential V1", "the maps", ("diff/speed", 0), ("diff/table2", 0)),
    Repair("differential V2", "the maps", ("diff/speed", 1), ("diff/v2", 0)),
)


def comparisons(rows: Sequence[Judged]) -> Iterator[tuple[Repair, Pooled, Pooled]]:
    """Each repair with its price and its gain, over the records that the claims were judged by."""
    known: Mapping[str, tuple[Pooled, ...]] = {claim.name: ones for claim, ones, _ in rows}
    for one in REPAIRS:
        costs, buys = (known[name][place] for name, place in (one.costs, one.buys))
        yield one, costs, buys


def worth(costs: Judgement, buys: Judgement) -> str:
    """The word for a gain at a price."""
    if buys is not Judgement.HOLDS:
        return {
            Judgement.UNTESTED: "not tested",
            Judgement.UNDECIDED: "not shown",
            Judgement.DOES_NOT_HOLD: "no",
        }[buys]
    return {
        Judgement.HOLDS: "worth it here",
        Judgement.DOES_NOT_HOLD: "at a price",
    }.get(costs, "gains; its price is open")


def seen_in(row: Pooled) -> str:
    """The records that count, with their seeds."""
    found = (f"{one.source}: {one.than.n} seeds" for one in row.counted)
    return "; ".join(found) or "no record that counts"
