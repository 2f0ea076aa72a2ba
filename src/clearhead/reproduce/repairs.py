"""Each repair in a line: what it changes, costs and buys, where that was seen, is it worth it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from clearhead.reproduce.claims import Judged
from clearhead.reproduce.contrasts import Judgement
from clearhead.reproduce.pooling import Pooled

COLUMNS = ("repair", "what it changes", "what it costs", "what it buys", "seen in", "worth it?")


class Place(NamedTuple):
    """One comparison of a claim, and what the table calls its difference."""

    words: str
    claim: str
    place: int


class Repair(NamedTuple):
    """A repair, and the comparisons that say its price and its gain."""

    name: str
    changes: str
    costs: Place
    buys: Place


_SPEED, _BESIDE = "change in tokens a second", "loss, beside other repairs"
# fmt: off
REPAIRS = (
    Repair("prefix and rotation, trained", "a token before the text, turned weights",
        Place("perplexity of code, against plain training", "retrofit/loss", 0),
        Place("perplexity saved at 8 bits, against plain training", "retrofit/controls", 0)),
    Repair("ALiBi", "positions", Place("perplexity at the training length", "position/alibi", 0),
        Place("perplexity at 16 × it, neither scaled", "position/alibi", 1)),
    Repair("CoCA, exact", "scores", Place("perplexity at the training length", "coca/exact", 0),
        Place("perplexity at 8 × it, both with NTK", "coca/table1", 1)),
    Repair("SAS-P", "the block", Place(_SPEED, "sas/table1", 0),
        Place("loss, 6 layers", "sas/figure5", 1)),
    Repair("softmax-1", "the normaliser", Place("loss on text", "softmax1/loss", 0),
        Place("queries that look most at the first token", "softmax1/share", 0)),
    Repair("OrthoAdam, shared", "the optimizer", Place(_BESIDE, "together/loss", 5),
        Place("kurtosis of the first token", "softmax1/kurtosis", 2)),
    Repair("differential V1", "the maps", Place(_SPEED, "diff/speed", 0),
        Place("two of six needles found", "diff/table2", 0)),
    Repair("differential V2", "the maps", Place(_SPEED, "diff/speed", 1),
        Place("loss", "diff/v2", 0)),
)
# fmt: on


def comparisons(rows: Sequence[Judged]) -> Iterator[tuple[Repair, Pooled, Pooled]]:
    """Each repair with its price and its gain, over the records that the claims were judged by."""
    known: Mapping[str, tuple[Pooled, ...]] = {claim.name: ones for claim, ones, _ in rows}
    for one in REPAIRS:
        costs, buys = (known[at.claim][at.place] for at in (one.costs, one.buys))
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
