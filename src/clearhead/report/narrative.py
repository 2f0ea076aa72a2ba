"""Sentences of a page: plain text built from the records, not yet escaped."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clearhead.records.runs import Records, Run
from clearhead.report import style
from clearhead.report.heatmaps import SHARE
from clearhead.report.page import Tag
from clearhead.report.pivots import no_seed_varies, seeds_in_words, summary
from clearhead.report.statistics import Difference, Verdict, compare, summarize
from clearhead.report.verdicts import holds

_WORDS = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)
MANY = 6  # arms: beyond, sentences give ranges instead of a number each


def in_words(n: int) -> str:
    """three; 31."""
    return _WORDS[n] if n < len(_WORDS) else str(n)


def enumerate_words(words: Sequence[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def record_name(label: str) -> str:
    """Name of the records under one label on the page."""
    return label[:1].upper() + label[1:] or "This run"


def title_of(records: Records) -> str:
    """The models by name, as a page's title."""
    arms = records.arms()
    if len(arms) <= MANY:
        return enumerate_words(arms) if arms else "No records"
    return f"{arms[0]} and {in_words(len(arms) - 1)} others"


def text_in_words(records: Records) -> str:
    """on books.jsonl (held-out part): the text that was read; "" where records do not say."""
    texts: dict[str, None] = {}
    for run in records.runs:
        data, settings = (run.header.get(name) or {} for name in ("data", "evaluation"))
        specs = [str(one["spec"]) for one in data.get("sources") or () if isinstance(one, dict)]
        part = "" if settings.get("split") == "all" else " (held-out part)"
        texts |= {", ".join(specs) + part: None} if specs else {}
    return f" on {'; '.join(texts)}" if texts else ""


def sets(records: Records) -> list[tuple[Tag, Records]]:
    """The records of each label under its mark."""
    return [(_tag(one, records.labelled(one)), records.labelled(one)) for one in records.labels()]


def _tag(label: str, records: Records) -> Tag:
    amounts = sorted({run.budget or 0.0 for run in records.runs})
    facts = [f"{style.count(amounts[-1])} tokens a model"] if amounts and amounts[-1] else []
    seeds = max((len(records.of(arm)) for arm in records.arms()), default=0)
    facts += [] if records.given or no_seed_varies(records) else [seeds_in_words(seeds)]
    return Tag(label=label, name=record_name(label), facts=" · ".join(facts))


def extremes(means: Mapping[str, float]) -> tuple[str, str]:
    """The names of the least and of the greatest."""
    return min(means, key=lambda one: means[one]), max(means, key=lambda one: means[one])


def listed(means: dict[str, float], write: Callable[[float], str], word: str) -> str:
    """Each arm's number, or, where they are many, the least and the greatest."""
    if not means:
        return ""
    if len(means) <= MANY:
        return enumerate_words([f"{write(mean)} {word} {arm}" for arm, mean in means.items()])
    ends = [f"{write(means[arm])} {word} {arm}" for arm in extremes(means)]
    return f"between {' and '.join(ends)}"


def means(records: Records, metric: str, **dimensions: Any) -> dict[str, float]:
    """{arm: mean over seeds}, without arms that lack the measure."""
    found = {arm: summary(records, arm, metric, **dimensions) for arm in records.arms()}
    return {arm: over.mean for arm, over in found.items() if over is not None}


def answer(
    records: Records,
    what: str,
    metric: str,
    write: Callable[[float], str] = style.number,
    **dimensions: Any,
) -> str:
    """A sentence with the least and the greatest mean of each set of records; "" without any."""
    parts = []
    for label in records.labels():
        found = means(records.labelled(label), metric, **dimensions)
        if not found:
            continue
        least, greatest = extremes(found)
        words = f"from {write(found[least])} for {least} to {write(found[greatest])} for {greatest}"
        if len(found) == 1:
            words = f"{write(found[least])} for {least}"
        parts.append(words if len(records.labels()) == 1 else f"{record_name(label)}: {words}")
    return f"{what}: {'; '.join(parts)}." if parts else ""


def lead(records: Records, threshold: float) -> list[str]:
    """Perplexity and training speed of each model beside the reference's, with its interval.

    Args:
        threshold: the largest p of a difference that holds among all comparisons of the page.
    """
    if not records.runs:
        return ["There are no records yet."]
    labels = records.labels()
    sentences = []
    for label in labels:
        labelled = records.labelled(label)
        said = beside(
            labelled,
            threshold,
            "Validation perplexity",
            "perplexity",
            words=("better", "worse"),
            length=labelled.sequence_length(),
        )
        where = f"{record_name(label)}: " if len(labels) > 1 else ""
        sentences += [f"{where}{said}"] if said else []
    cost = beside(
        records.labelled(labels[0]).on_one_device(),
        threshold,
        "Training speed",
        "tokens_per_second",
        write=lambda speed: f"{style.count(speed)} tokens/s",
        words=("slower", "faster"),
    )
    return [one for one in (" ".join(sentences), cost) if one]


def beside(
    records: Records,
    threshold: float,
    what: str,
    metric: str,
    *,
    write: Callable[[float], str] = style.number,
    words: tuple[str, str] = ("lower", "higher"),
    **dimensions: Any,
) -> str:
    """A sentence with each arm's number beside the reference's, in per cent of it; of many arms the
    least and the greatest. "" without a number.

    Args:
        words: what an arm is whose number is below the reference's, and above it.
    """
    numbers = means(records, metric, **dimensions)
    reference = next(iter(records.arms()), "")
    others = {arm: mean for arm, mean in numbers.items() if arm != reference}
    if not numbers.get(reference) or not others:
        return answer(records, what, metric, write, **dimensions)
    chosen = list(others) if len(others) < MANY else dict.fromkeys(extremes(others))
    base = list(records.values(reference, metric, **dimensions).values())
    parts = []
    for arm in chosen:
        found = compare(list(records.values(arm, metric, **dimensions).values()), base)
        assert found is not None
        change = _change(found, numbers[reference], words, threshold)
        parts.append(f"{arm} at {write(others[arm])}, {change}")
    more = f"; {len(others) - len(parts)} more between them" * (len(others) > len(parts))
    return f"{what} beside {reference} ({write(numbers[reference])}): {'; '.join(parts)}{more}."


def _change(found: Difference, base: float, words: tuple[str, str], threshold: float) -> str:
    """A difference in per cent of the reference's number, with its interval or why it has none."""
    share = found.mean / base
    said = f"{style.percent(abs(share))} {words[share > 0]}" if share else "alike"
    if found.interval is None:
        return f"{said} ({found.verdict})"
    if not holds(found, threshold):
        least = style.percent((found.decidable or 0.0) / base)
        why = "undecided" if found.verdict is Verdict.UNDECIDED else "alone"
        return f"{said} ({why}, ±{least})"
    low, high = sorted(100 * abs(end) / base for end in found.interval)
    return f"{said} (95\u00a0% interval {style.bounds(low, high)}\u00a0%)"


def only_evaluated(records: Records) -> bool:
    """True if no run was trained in these records: `clearhead eval` takes models from anywhere."""
    return not any(
        run.steps or any("task" not in one.dimensions for one in run.measures.values())
        for run in records.runs
    )


def warnings(records: Records) -> list[str]:
    """Warnings before any number: few seeds, runs that diverged, models that have hardly learnt."""
    found = []
    for label in records.labels():
        labelled = records.labelled(label)
        where = "" if len(records.labels()) == 1 else f"{record_name(label)}: "
        whole = {arm: len(labelled.whole(arm)) for arm in labelled.arms()}
        given = labelled.given or no_seed_varies(labelled)
        few = 0 if given else min(filter(None, whole.values()), default=0)
        if len(labelled.arms()) > 1 and few == 1:
            several = any(n > 1 for n in whole.values())
            who = "Some models have one seed" if several else "One seed a model"
            found.append(f"{where}{who}: no difference of theirs to another can be decided.")
        elif len(labelled.arms()) > 1 and few == 2:
            found.append(
                f"{where}Two seeds a model: only a difference many times their spread is decided."
            )
        runs = {arm: len(labelled.of(arm)) for arm in whole}
        lost = [f"{runs[a] - n} of {runs[a]} runs of {a}" for a, n in whole.items() if n < runs[a]]
        if lost:
            found.append(f"{where}Left out, since they diverged: {enumerate_words(lost)}.")
        edge = [arm for arm in labelled.arms() if labelled.at_edge(arm)]
        if edge:
            who = enumerate_words(edge) if len(edge) <= MANY else f"{len(edge)} models"
            found.append(
                f"{where}The learning rate of {who} is the lowest or the highest of those that "
                "were tried: a better one may lie beyond."
            )
        hardly = [arm for arm in labelled.arms() if any(map(_hardly_learnt, labelled.of(arm)))]
        if hardly:
            who = enumerate_words(hardly) if len(hardly) <= MANY else f"{len(hardly)} models"
            have = "has" if len(hardly) == 1 else "have"
            found.append(
                f"{where}{who} {have} hardly learnt: a perplexity above the square root of the "
                "vocabulary. What mechanisms do in trained models may not show yet."
            )
    return found


def _hardly_learnt(run: Run) -> bool:
    model, data = run.header.get("model"), run.header.get("data")
    vocabulary = (model or {}).get("vocab_size") if isinstance(model, dict) else None
    if vocabulary is None and isinstance(data, dict):
        vocabulary = (data.get("tokenizer") or {}).get("vocabulary")
    value = run.value("perplexity", length=run.sequence_length)
    return vocabulary is not None and value is not None and value > math.sqrt(vocabulary)


def sink(records: Records) -> str:
    """The share of queries whose largest weight is on the first token, against chance; "" where
    records lack it."""
    shares = means(records, SHARE, map="difference") | means(records, SHARE, map="softmax")
    shares = {arm: shares[arm] for arm in records.arms() if arm in shares}
    if not shares:
        return ""
    said = f"Queries that look most at the first token: {listed(shares, style.percent, 'in')}"
    if len(shares) == 1:
        (share,) = shares.values()
        said = f"{style.percent(share)} of queries look most at the first token"
    floor = chance_floor(records)
    return f"{said}." if floor is None else f"{said}; chance {style.percent(floor)}."


def chance_floor(records: Records) -> float | None:
    """The argmax share that attention without any preference would show; None if not recorded."""
    values = [run.value("chance_floor") for run in records.runs]
    over = summarize([value for value in values if value is not None])
    return None if over is None else over.mean
