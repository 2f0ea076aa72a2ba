"""Colours, and formatting of text and numbers from records, with all markup escaped."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# For a light and for a dark page. They differ in lightness as well as in hue, so that they stay
# apart under the common colour-vision deficiencies.
_HUES = (
    ("#5b6472", "#aab4c2"),  # slate: the baseline
    ("#0a6ebd", "#58b4f5"),  # blue
    ("#c4540a", "#f59a52"),  # vermilion
    ("#0b8a66", "#35c9a0"),  # green
    ("#8c4a9e", "#cf96e0"),  # purple
    ("#9a7400", "#e2c044"),  # ochre
    ("#b83a78", "#f287b7"),  # magenta
    ("#0f8794", "#58d0dc"),  # cyan
    ("#c1272d", "#ff8a85"),  # red
    ("#5f8f00", "#b3d957"),  # lime
    ("#3d3fb5", "#a5a8ff"),  # indigo
    ("#7a4b2a", "#c9a17c"),  # brown
)
_SYMBOLS = ("circle", "diamond", "square")

# Named fonts before system-ui, which on a bare Linux is a face too wide for figures.
FONT = (
    '-apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", "Liberation Sans", Arial, '
    "system-ui, sans-serif"
)

SEQUENTIAL = (
    ("#f6f3ec", "#1c2027"),
    ("#c6d7e6", "#1d3d5c"),
    ("#7cadd2", "#2c6ca5"),
    ("#2c73ad", "#64b0e6"),
    ("#0b3763", "#e6f4ff"),
)
PAPER = ("#fdfcf9", "#16191e")
INK = ("#22262c", "#dde2e9")
MUTED = ("#5f656f", "#a0a8b3")
GRID = ("#e5e2da", "#2a2f37")

LIGHT_TO_DARK = dict((*_HUES, *SEQUENTIAL, PAPER, INK, MUTED, GRID))


class Look(NamedTuple):
    """Style of one arm in every figure and table of a page."""

    colour: str
    dark: str
    symbol: str


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """The next hue for each arm; after twelve with another symbol."""
    turns = ((arm, *divmod(place, len(_HUES))) for place, arm in enumerate(arms))
    return {arm: Look(*_HUES[hue], _SYMBOLS[turn % 3]) for arm, turn, hue in turns}


def plain(text: object) -> str:
    """`text` escaped so that plotly, which interprets tags and entities, shows it verbatim."""
    # Control characters, lone surrogates and bidirectional overrides would disturb the page.
    shown = (one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(text))
    return "".join(shown).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def number(value: float, digits: int = 3) -> str:
    """`value` to about `digits` significant digits: 41.2, 0.0312, 1,234; 1.2e+12 where too long."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if not -6 < exponent < 9:
        return _minus(f"{value:.{digits - 1}e}")
    return _minus(f"{value:,.{max(0, digits - 1 - exponent)}f}")


def with_spread(mean: float, deviation: float | None) -> str:
    """`mean ± deviation`, to the deviation's second digit; ± 0 below 1e-5 of the mean."""
    if deviation is None or deviation <= 1e-5 * abs(mean):
        return number(mean) + ("" if deviation is None else " ± 0")
    if not 1e-6 < deviation < 1e9:
        return f"{number(mean)} ± {number(deviation, 2)}"
    places = _places(deviation)
    return _minus(f"{mean:,.{places}f} ± {deviation:,.{places}f}")


def signed(value: float, width: float | None = None) -> str:
    """+0.12 or −9, to the second digit of `width`."""
    text = number(value) if width is None else _minus(f"{value:,.{_places(width)}f}")
    return text if value <= 0 else f"+{text}"


def bounds(low: float, high: float) -> str:
    """`low to high`, to the width's second digit."""
    places = _places(high - low)
    return " to ".join(_minus(f"{bound:,.{places}f}") for bound in (low, high))


def _places(width: float) -> int:
    """Decimal places up to the second digit of a width."""
    return max(0, 1 - math.floor(math.log10(width))) if 1e-6 < width < 1e9 else 3


def _minus(text: str) -> str:
    """A negative number with a minus for its hyphen; one that is rounded to zero without."""
    shown = text.removeprefix("-")
    return shown if shown == text or not shown.strip("0.") else f"−{shown}"


def count(value: float) -> str:
    """A count with a suffix for thousands or millions: 1.92 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{number(value / size)}\u00a0{unit}"
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """A share as a percentage: 3.1 %."""
    return f"{number(100 * value, 2 if abs(value) < 0.0995 else 3)}\u00a0%"
