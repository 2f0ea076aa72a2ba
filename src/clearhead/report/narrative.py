"""Sentences of a page: plain text built from the records, not yet escaped."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clearhead.records.runs import Records, Run
from clearhead.report import style
from clearhead.report.page import Tag
from clearhead.report.pivots import seeds_in_words, summary
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
    facts += [] if records.given else [seeds_in_words(seeds)]
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
        parts.append(words if len(records.labels()) == 1 else f"in {_where(label)} {words}")
    return f"{what}: {'; '.join(parts)}." if parts else ""


def _where(label: str) -> str:
    return f"“{label}”" if label else "this run"


def lead(records: Records, threshold: float) -> str:
    """The first sentence: what was compared, and what came out in each set of records.

    Args:
        threshold: the largest p of a difference that holds among all comparisons of the page.
    """
    arms = records.arms()
    if not arms:
        return "There are no records yet."
    if len(arms) == 1:
        done = "evaluated" if only_evaluated(records) else "trained and measured"
        what = f"One language model, {arms[0]}, was {done}"
    else:
        number = in_words(len(arms)).capitalize()
        shared = all(_same_data(records.labelled(label)) for label in records.labels())
        done = "evaluated" if only_evaluated(records) else "trained"
        what = f"{number} language models, {_named(records)}, were {done}"
        what += " on the same text" if shared else ""
    outcomes: dict[str, dict[str, str]] = {}
    for label in records.labels():
        outcome, limit = _decided(records.labelled(label), threshold)
        if outcome:
            outcomes.setdefault(outcome, {})[_where(label)] = limit
    said = []
    for outcome, limits in outcomes.items():
        hidden = [limit for limit in limits.values() if limit]
        said.append(f"in {enumerate_words([*limits])} {outcome}")
        said[-1] += f" {enumerate_words(hidden)}" if hidden else ""
    return f"{what}: {'; '.join(said)}." if said else f"{what}."


def _named(records: Records) -> str:
    """The arms by name, or, where they are many, how they came about."""
    arms = records.arms()
    if len(arms) <= MANY:
        return enumerate_words(arms)
    varied: dict[str, set[str]] = {}
    for run in records.runs:
        for key, value in (run.header.get("changes") or {}).items():
            varied.setdefault(str(key), set()).add(str(value))
    presets = list(dict.fromkeys(run.preset for run in records.runs))
    if not varied or len(presets) > MANY:
        return f"{arms[0]} and {in_words(len(arms) - 1)} others"
    values = [f"{in_words(len(values))} values of {key}" for key, values in varied.items()]
    each = " each" if len(presets) > 1 else ""
    return f"{enumerate_words(presets)}{each} with {enumerate_words(values)}"


def only_evaluated(records: Records) -> bool:
    """True if no run was trained in these records: `clearhead eval` takes models from anywhere."""
    return not any(
        run.steps or any("task" not in one.dimensions for one in run.measures.values())
        for run in records.runs
    )


def _same_data(records: Records) -> bool:
    """True if all runs describe the same data."""
    described = [run.header.get("data") for run in records.runs]
    return described[0] is not None and all(one == described[0] for one in described)


def _differences(records: Records, metric: str, **dimensions: Any) -> dict[str, Difference]:
    """Each variant's number less the reference's."""
    reference, *variants = records.arms()
    values = {arm: list(records.values(arm, metric, **dimensions).values()) for arm in variants}
    others = list(records.values(reference, metric, **dimensions).values())
    compared = {arm: compare(values[arm], others) for arm in variants}
    return {arm: difference for arm, difference in compared.items() if difference is not None}


def _decided(records: Records, threshold: float) -> tuple[str, str]:
    """The outcome in words, and the largest effect that it leaves hidden, which ends them."""
    trained = records.sequence_length()
    differences = _differences(records, "perplexity", length=trained)
    if not differences:
        return "", ""
    if all(one.verdict is Verdict.ONE_SEED for one in differences.values()):
        return "a single seed cannot say which predicts unseen text better", ""
    reference = records.arms()[0]
    parts = []
    for wanted, word in ((Verdict.LOWER, "better"), (Verdict.HIGHER, "worse")):
        named = [
            arm
            for arm, one in differences.items()
            if one.verdict is wanted and holds(one, threshold)
        ]
        if named:
            verb = "predicts" if len(named) == 1 else "predict"
            parts.append(f"{enumerate_words(named)} {verb} unseen text {word} than {reference}")
    if not parts:
        limits = [one.decidable for one in differences.values() if one.decidable is not None]
        if not limits:
            alike = "as no seed differs from another"
            return f"no difference to {reference} can be judged, {alike}", ""
        length = "" if trained is None else " at the training length"
        return (
            f"no difference to {reference} in perplexity{length} exceeds the spread of the seeds, "
            "which hides effects of up to"
        ), style.number(max(limits), 2)
    return enumerate_words(parts), ""


def cost(records: Records, threshold: float) -> str:
    """The second sentence: what each model costs to train, beside the reference; "" if unknown."""
    labels = records.labels()
    where = f" in {_where(labels[0])}" if len(labels) > 1 else ""
    records = records.labelled(labels[0]).on_one_device() if labels else records
    speeds, memory = means(records, "tokens_per_second"), means(records, "peak_memory_bytes")
    if not speeds:
        return ""
    reference, *_ = records.arms()
    if len(speeds) == 1 or reference not in speeds:
        said = listed(speeds, lambda speed: f"{style.count(speed)} tokens a second", "for")
        return f"Training{where} ran at {said}."
    differences = _differences(records, "tokens_per_second")
    others = [arm for arm in speeds if arm != reference]
    if len(others) > MANY:
        others = [*extremes({arm: speeds[arm] for arm in others})]
    parts = []
    for arm in others:
        part = f"{arm} trains at {speeds[arm] / speeds[reference]:.2f} × its speed"
        if arm in differences and not holds(differences[arm], threshold):
            seen = differences[arm].decidable
            least = f", ±{style.number(seen / speeds[reference], 2)}" if seen else ""
            part += f" (undecided{least})"
        if arm in memory and memory.get(reference):
            part += f" with {memory[arm] / memory[reference]:.2f} × its memory"
        parts.append(part)
    return f"Beside {reference}{where}, {enumerate_words(parts)}."


def warnings(records: Records) -> list[str]:
    """Warnings before any number: few seeds, runs that diverged, models that have hardly learnt."""
    found = []
    for label in records.labels():
        labelled = records.labelled(label)
        where = "" if len(records.labels()) == 1 else f"{record_name(label)}: "
        whole = {arm: len(labelled.whole(arm)) for arm in labelled.arms()}
        few = 0 if labelled.given else min(filter(None, whole.values()), default=0)
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


def sinks(records: Records) -> str:
    """Share of queries that attend most to the first token, in each set of records."""
    sets_of = {one: sink(records.labelled(one)) for one in records.labels()}
    said = {label: text for label, text in sets_of.items() if text}
    if len(records.labels()) == 1:
        return "".join(said.values())
    return " ".join(f"{record_name(label)}: {text}" for label, text in said.items())


def sink(records: Records) -> str:
    """Share of queries that attend most to the first token, against chance."""
    shares = means(records, "first_token_argmax_share", map="softmax")
    if not shares:
        return ""
    said = listed(shares, style.percent, "in")
    text = f"Queries and heads that attend most to the first token: {said}"
    floor = chance_floor(records)
    if floor is None:
        return f"{text}."
    text += f", where chance gives {style.percent(floor)}"
    if max(shares.values()) < 2 * floor:
        return f"{text}: no sink on the first token has formed."
    return f"{text}."


def chance_floor(records: Records) -> float | None:
    """The argmax share that attention without any preference would show; None if not recorded."""
    values = [run.value("chance_floor") for run in records.runs]
    over = summarize([value for value in values if value is not None])
    return None if over is None else over.mean
