"""A second reader of the records, with pandas and SciPy alone; it shares no code with clearhead."""

import json
import math
import re
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import fmean, variance

import pandas as pd
from scipy.optimize import brentq
from scipy.stats import norm, t

ROOT = Path(__file__).parents[2]
DIMENSIONS = {
    *("task", "scaling", "factor", "length", "longest", "depth", "needles", "queries", "pairs"),
    *("data", "file", "judge", "version", "shots", "order", "document", "scheme", "split", "at"),
    *("map", "layer", "head", "tokens", "position", "step"),
}
MAPS = ("softmax", "map 1", "map 2", "difference", "shaped")
# Claim; measure (@ lengths of training, [label]); arm; arm compared with; bound. ~ is a ratio, + a
# space.
DEFINITIONS = Path(__file__).with_name("sceptic.txt").read_text("utf-8").splitlines()
PLACES = re.compile(r"\[((?:\[\w+\]|[^\]\[])+)\]")


def parsed(spec):
    """Metric, multiple of the training length, pattern of labels and dimensions of a measure."""
    label = PLACES.search(spec)
    words = PLACES.sub("", spec).replace("@", " @").split()
    times = next((float(word[1:]) for word in words if word[0] == "@"), None)
    at = dict(word.split("=") for word in words if "=" in word)
    at = {name: float(value) if value.isdigit() else value for name, value in at.items()}
    return words[0].lstrip("~").replace("+", " "), times, label[1] if label else "*", at


@cache
def table():
    """A row for each final number of a run; the mean of its draws, weighted by their items."""
    needed = {parsed(line.split("; ")[1])[0] for line in DEFINITIONS}
    needed |= {"perplexity", "hidden_top_1", "hidden_median", "chance_floor", "forced_tokens"}
    draws, runs = {}, {}
    for path in sorted(ROOT.glob("results/*.jsonl")):
        if any(word in path.stem for word in ("bench", "gpu", "rates", "sweeps")):
            continue
        for line in path.read_text("utf-8").splitlines():
            if '"kind": "run"' in line:
                one = json.loads(line)
                runs[path.name, one["run"]] = runs.get((path.name, one["run"]), {}) | one
            elif '"kind": "measure"' in line:
                one = json.loads(line)
                if one["metric"] in needed and one.get("step") is None and one["value"] is not None:
                    at = {k: one[k] for k in DIMENSIONS if one.get(k) is not None}
                    if at.get("split") == "validation":
                        del at["split"]
                    place = path.name, one["run"], one["metric"], json.dumps(at, sort_keys=True)
                    draws.setdefault(place, {})[one.get("draw", 0)] = one
    rows = []
    for (source, run, metric, at), ones in draws.items():
        head = runs[source, run]
        name, _, seed = run.rpartition("seed")
        arm = head.get("arm") or head.get("preset") or (name[:-1] if name else run)
        seed = head.get("seed", int(seed) if name else 0)
        items = [one.get("items") or [] for one in ones.values()]
        value = fmean([one["value"] for one in ones.values()], [len(x) or 1 for x in items])
        trained = (head.get("train") or {}).get("sequence_length") or 0
        rows.append({"source": source, "label": head.get("label", ""), "run": run, "arm": arm})
        rows[-1] |= {"parameters": head.get("parameters")}
        rows[-1] |= {"seed": seed, "metric": metric, "value": value, "trained": trained, "key": at}
        rows[-1] |= {"items": [x for some in items for x in some] if all(items) else []}
        rows[-1] |= {"aside": any(one.get("aside") for one in ones.values()), "at": json.loads(at)}
    frame = pd.DataFrame(rows)
    few = frame[(frame.metric == "perplexity") & (frame["key"].str.contains('"scheme"'))]
    full = frame[(frame["key"] == "{}") & (frame.metric == "perplexity")].assign(metric="full")
    few = few.merge(full[["source", "run", "value", "items"]], on=["source", "run"])
    few["value"] = few.value_x - few.value_y
    few["items"] = [
        [x - y for x, y in zip(*two, strict=True)]
        for two in zip(few.items_x, few.items_y, strict=True)
    ]
    frame = pd.concat([frame, full, few.assign(metric="added_perplexity")], ignore_index=True)
    return {name: one.to_dict("records") for name, one in frame.groupby("metric")}


def numbers(spec, arms):
    """(source, label) → the numbers of the first of these arms that has any."""
    metric, times, label, at = spec
    runs = defaultdict(lambda: defaultdict(list))
    for one in table()[metric]:
        fits = times is None or one["at"].get("length") == round(times * one["trained"])
        if fits and at.items() <= one["at"].items() and fnmatchcase(one["label"], label):
            ranks = [n for n, arm in enumerate(arms.split("|")) if fnmatchcase(one["arm"], arm)]
            if ranks:
                runs[one["source"], one["label"]][ranks[0], one["run"]].append(one)
    return {
        place: [kept(rows, at) for (rank, _), rows in found.items() if rank == min(found)[0]]
        for place, found in runs.items()
    }


def kept(rows, at):
    """The last map, and neither opening windows nor numbers of other texts if there are others."""
    last = [one for one in MAPS if any(row["at"].get("map") == one for row in rows)][-1:]
    rows = [row for row in rows if not last or row["at"].get("map", last[0]) == last[0]]
    if "at" not in at:
        rows = [row for row in rows if "at" not in row["at"]] or rows
    return [row for row in rows if not row["aside"]] or rows


def spread_of(values):
    """The variance over seeds; 0 of seeds that agree to rounding."""
    return variance(values) if max(values) - min(values) > 1e-12 * max(map(abs, values)) else 0.0


class Comparison:
    """Two arms of a record: means, and Welch's test, over seeds and over drawn items too."""

    def __init__(self, mine, theirs, apart, ratio):
        self.ratio, self.seeds, self.drawn = ratio, [], []
        for side in (mine, theirs):
            for row in (row for run in side for row in run):
                row["place"] = frozenset((k, v) for k, v in row["at"].items() if k not in apart)
        shared = set.intersection(*({row["place"] for row in run} for run in (*mine, *theirs)))
        for side in (mine, theirs):
            values, items = defaultdict(list), defaultdict(list)
            for row in (row for run in side for row in run if row["place"] in shared):
                values[row["seed"]].append(row["value"])
                items[row["place"]].append(row["items"])
            self.seeds.append([fmean(one) for one in values.values()])
            self.drawn.append(items)
        if not all(self.seeds):
            return
        self.means = [fmean(values) for values in self.seeds]
        self.weight = 2 / sum(1 / len(values) for values in self.seeds)
        self.bounds = self.interval() if min(map(len, self.seeds)) > 1 else None

    def items(self, share):
        """Variance and degrees of freedom of what was drawn; None where records lack it."""
        strata, all_trials = [], True
        for place in self.drawn[0]:
            sides = [one[place] for one in self.drawn]
            sizes = {len(x) for side in sides for x in side}
            if len(sizes) > 1 or min(sizes) < 2:
                return None
            all_trials &= all(item in (0, 1) for side in sides for x in side for item in x)
            a, b = ([fmean(one) for one in zip(*side, strict=True)] for side in sides)
            strata.append([x - share * y for x, y in zip(a, b, strict=True)])
        total = sum(variance(one) / len(one) for one in strata) / len(strata) ** 2
        degrees = sum(len(one) - 1 for one in strata)
        if all_trials and not total:
            n = degrees + len(strata)
            total = 2 / (n + 2) * (1 - 1 / (n + 2)) / (n + 2)
        return total, degrees

    def errors(self, share=1.0):
        parts = [
            (k * spread_of(x) / len(x), len(x) - 1)
            for x, k in zip(self.seeds, (1, share**2), strict=True)
        ]
        drawn = self.items(share)
        for some in (parts, [*parts, drawn] if drawn else parts):
            total = sum(one for one, _ in some)
            if total:
                yield math.sqrt(total), total**2 / sum(v**2 / df for v, df in some)

    def p(self, against):
        share = 1 + against if self.ratio else 1.0
        mean = self.means[0] - share * self.means[1] - (0 if self.ratio else against)
        return max((2 * t.sf(abs(mean) / e, df) for e, df in self.errors(share)), default=None)

    @property
    def mean(self):
        return self.means[0] / self.means[1] - 1 if self.ratio else self.means[0] - self.means[1]

    def interval(self):
        halves = [t.ppf(0.975, df) * e for e, df in self.errors()]
        if not halves:
            return None
        if not self.ratio:
            return self.mean - max(halves), self.mean + max(halves)
        reach = 20 * max(halves) / abs(self.means[1])
        ends = (self.mean - reach, self.mean + reach)
        n, spread = len(self.seeds[1]), spread_of(self.seeds[1])
        if spread and 2 * t.sf(self.means[1] / math.sqrt(spread / n), n - 1) > 0.05:
            return None  # the number compared with may be zero
        return tuple(brentq(lambda x: self.p(x) - 0.05, self.mean, end) for end in ends)


def together(ones):
    """Mean and bounds of several records: Stouffer's z, by the square root of their runs."""
    if len(ones) == 1 or ones[0].bounds is None:
        return ones[0].mean, ones[0].bounds
    weights = [math.sqrt(one.weight) for one in ones]

    def z(x):
        scores = [math.copysign(norm.isf(one.p(x) / 2), one.mean - x) for one in ones]
        return sum(w * s for w, s in zip(weights, scores, strict=True)) / math.hypot(*weights)

    ends = [end for one in ones for end in one.bounds]
    low, high = 2 * min(ends) - max(ends), 2 * max(ends) - min(ends)
    at = [
        brentq(lambda x, level=level: z(x) - level, low, high, xtol=1e-12)
        for level in (0, 1.959964, -1.959964)
    ]
    return at[0], at[1:]


def of(file, arm, spec, scale=1.0):
    """A number of each seed of an arm."""
    runs = [
        run
        for (name, _), some in numbers(parsed(spec), arm).items()
        for run in some
        if fnmatchcase(name, file)
    ]
    return [scale * fmean(row["value"] for row in run) for run in runs]


def against(file, spec, arm, than, ratio=False):
    """Mean and bounds of a comparison that no claim makes."""
    mine, theirs = (numbers(parsed(spec), one) for one in (arm, than))
    (place,) = [one for one in mine if one[0] == file]
    one = Comparison(mine[place], theirs[place], {"map", "length"}, ratio)
    return one.mean, *(one.bounds or ())


NUMBER = re.compile(r"[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?")


def agree(text, *values):
    """The numbers in a text are these, to the last digit shown; how many there are."""
    shown = [one.replace(",", "").replace("−", "-") for one in NUMBER.findall(text)]
    assert len(shown) == len(values), (text, values)
    for one, value in zip(shown, values, strict=True):
        mantissa, _, power = one.partition("e")
        last = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        assert abs(float(one) - value) <= 0.5001 * last, (text, values)
    return len(values)
