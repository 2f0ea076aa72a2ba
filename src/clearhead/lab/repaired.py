"""A repair in three numbers, before and after: the sink, the largest state, the price of 8 bits."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clearhead.diagnose import RowMeans
from clearhead.diagnose.hidden import ResidualStream
from clearhead.probe import measure
from clearhead.probe.tiles import ByTile
from clearhead.quantize import Texts, cost, scheme

WINDOWS = 1  # of 512 tokens: enough to tell a price of 100 % from one of 1 %
EIGHT_BITS = "w8a8-coarse"


def three_numbers(model: Any, windows: Sequence[Tensor]) -> dict[str, float | None]:
    """Of a causal language model, on int64 [T] windows of text; None where it has no such number.

    Returns:
        sink: the share of queries, over layers and heads, whose largest weight is on the first
            token; of the difference of maps, where a model has one.
        largest_state: the largest absolute hidden state, over their median.
        eight_bits: what `w8a8-coarse` adds to the perplexity, as a share of it.
    """
    parts: Any = {"attention": [ByTile(weights=[RowMeans()])], "hidden": [ResidualStream()]}
    lines = measure(model, windows, batch_size=1, **parts)
    whole = {(x["metric"], x.get("map")): x["value"] for x in lines if "layer" not in x}
    sinks = (whole.get(("first_token_argmax_share", map)) for map in ("difference", "softmax"))
    top, median = (whole.get((f"hidden_{one}", None), 0.0) for one in ("top_1", "median"))
    texts = Texts(windows=windows)
    full, rounded = (cost(model, how, texts).perplexity for how in (None, scheme(EIGHT_BITS)))
    return {
        "sink": next((one for one in sinks if one is not None), None),
        "largest_state": top / median if median > 0 else None,
        "eight_bits": rounded / full - 1 if rounded and full else None,
    }


def in_three_lines(
    before: dict[str, float | None], after: dict[str, float | None], text: str
) -> list[str]:
    """Before → after, for people; `text` names what was read."""
    forms = {
        "sink": ("sink", "{:.1%}", "of queries look most at the first token"),
        "largest_state": ("largest state", "{:,.0f}", "times the median hidden state"),
        "eight_bits": ("8 bits", "{:+.1%}", f"perplexity with {EIGHT_BITS}"),
    }
    lines = []
    for number, (name, form, what) in forms.items():
        found = (numbers[number] for numbers in (before, after))
        ways = " → ".join("not measured" if one is None else form.format(one) for one in found)
        lines.append(f"{name}: {ways} {what} ({text})")
    return lines
