"""Rewrite what README and docs/claims.md take from the records: tables and a figure.

    make book

The tables are those of results/comparisons.md, which `clearhead reproduce --judge` makes: README
has that of the repairs, docs/claims.md a line a claim besides. The figure,
results/figures/smollm2-8-bits.svg, is drawn from the records of SmolLM2-135M.
"""

import json
import math
import re
from pathlib import Path
from statistics import fmean, stdev

from clearhead.records.files import write_text
from clearhead.records.intervals import t_quantile
from clearhead.report import style

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "results/figures/smollm2-8-bits.svg"
BLOCK = re.compile(r"(?<=<!-- made by: make book -->\n).*?(?=<!-- end -->)", re.DOTALL)
Bar = tuple[str, float, tuple[float, float] | None]
# Name on the figure, file, arm and training tokens.
MODELS = (
    ("as it is", "retrofit-eight.jsonl", "as it is", 0),
    ("trained on 250,000 tokens", "retrofit-250k.jsonl", "dense", 250_000),
    ("converted, not trained", "retrofit-seeds.jsonl", "prefix turned learned", 0),
)
LEFT, SCALE, ROW = 190, 2.9, 26


def summary() -> str:
    """The book without the comparisons by record: the table of repairs, and a line a claim."""
    book = ROOT.joinpath("results/comparisons.md").read_text("utf-8")
    return re.split(r"^## (?=.*arXiv)", book, maxsplit=1, flags=re.MULTILINE)[0]


def table() -> str:
    """The table of repairs."""
    return summary().split("\n\n")[1] + "\n"


def numbers(file: str, arm: str, tokens: int) -> list[dict[str, float]]:
    """Of each seed: perplexity in full precision ("full"), at 8 bits ("few"), and the "sink"."""
    runs: dict[str, dict[str, float]] = {}
    for line in ROOT.joinpath("results", file).read_text("utf-8").splitlines():
        one = json.loads(line)
        if one["kind"] == "run":
            rate = one["train"].get("learning_rate")
            if (one["arm"], one["train"]["tokens"]) == (arm, tokens) and rate in (None, 3e-5):
                runs[one["run"]] = {}
        elif one["kind"] == "measure" and one["run"] in runs:
            place = one["metric"], one.get("scheme"), one.get("task"), one.get("split")
            names = {
                ("perplexity", None, None, None): "full",
                ("perplexity", "w8a8-coarse", None, None): "few",
                ("first_token_argmax_share", None, None, None): "sink",
            }
            if place in names and not {"layer", "head", "step"} & one.keys():
                runs[one["run"]][names[place]] = one["value"]
    return list(runs.values())


def bar(name: str, values: list[float]) -> Bar:
    """A mean over seeds in per cent, with its 95 % interval where there are three."""
    mean = 100 * fmean(values)
    half = 100 * t_quantile(2) * stdev(values) / math.sqrt(3) if len(values) == 3 else 0.0
    return name, mean, (mean - half, mean + half) if half > 1e-6 else None


def panels() -> dict[str, list[Bar]]:
    """The bars of both panels."""
    costs, sinks = [], []
    for name, *place in MODELS:
        found = numbers(*place)
        costs.append(bar(name, [one["few"] / one["full"] - 1 for one in found]))
        sinks.append(bar(name, [one["sink"] for one in found]))
    return {
        "Perplexity added by 8 bits, one scale a tensor, %": costs,
        "Queries that look most at the first token, %": sinks,
    }


def drawing() -> str:
    """The figure as SVG."""
    paper, ink, muted = style.PAPER[0], style.INK[0], style.MUTED[0]
    looks = style.looks(["transformer", "trained", "converted"])
    colours = [look.colour for look in looks.values()]
    lines, top = [], 14
    for title, bars in panels().items():
        lines.append(f'<text x="12" y="{top + 12}" font-weight="600">{title}</text>')
        for (name, mean, interval), colour in zip(bars, colours, strict=True):
            top += ROW
            end = LEFT + SCALE * mean
            said = style.number(mean, 2 if mean < 10 else 3)
            if interval is not None:
                said += f" ({style.bounds(*interval)})"
            lines += [
                f'<text x="{LEFT - 8}" y="{top + 14}" text-anchor="end" fill="{muted}">'
                f"{name}</text>",
                f'<rect x="{LEFT}" y="{top + 2}" width="{SCALE * mean:.1f}" height="16" '
                f'fill="{colour}"/>',
                f'<text x="{end + 8:.1f}" y="{top + 14}">{said}</text>',
            ]
        top += 2 * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {top - 14}" width="640" '
        f'height="{top - 14}" font-family=\'{style.FONT}\' font-size="13" fill="{ink}">'
        f'<rect width="100%" height="100%" fill="{paper}"/>{"".join(lines)}</svg>\n'
    )


def main() -> None:
    for name, made in (("README.md", table()), ("docs/claims.md", summary())):
        page = ROOT / name
        write_text(page, BLOCK.sub(lambda _, made=made: made, page.read_text("utf-8")))
    write_text(FIGURE, drawing())


if __name__ == "__main__":
    main()
