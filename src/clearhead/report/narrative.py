"""What a page says in words: plain text built from the records, not yet escaped."""

from collections.abc import Callable, Sequence

from clearhead.report import style
from clearhead.report.records import Records, Run
from clearhead.report.statistics import Difference, Verdict, compare
from clearhead.report.tables import chance_floor
from clearhead.report.verdicts import holds

_WORDS = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)
MANY = 6  # arms: beyond, sentences give ranges instead of a number each


def in_words(n: int) -> str:
    return _WORDS[n] if n < len(_WORDS) else str(n)


def enumerate_words(words: Sequence[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def record_name(label: str) -> str:
    """What the records under one label are called on the page."""
    return label[:1].upper() + label[1:] or "This run"


def budget(run: Run) -> float | None:
    """Tokens that the run read, or else was to read."""
    if run.steps and run.steps[-1].get("tokens"):
        return float(run.steps[-1]["tokens"])
    planned = (run.header.get("train") or {}).get("tokens")
    return None if planned is None else float(planned)


def lead(records: Records, threshold: float) -> str:
    """The first sentence: what was compared, and what came out in each set of records.

    Args:
        threshold: the largest p of a difference that holds among all comparisons of the page.
    """
    arms = records.arms()
    if not arms:
        return "There are no records yet."
    if len(arms) == 1:
        done = "evaluated" if _only_evaluated(records) else "trained and measured"
        what = f"One language model, {arms[0]}, was {done}"
    else:
        number = in_words(len(arms)).capitalize()
        shared = all(_same_data(records.labelled(label)) for label in records.labels())
        done = "evaluated" if _only_evaluated(records) else "trained"
        what = f"{number} language models, {_named(records)}, were {done}"
        what += " on the same text" if shared else ""
    found = [
        (f"in {'this run' if not label else f'“{label}”'} ", outcome)
        for label in records.labels()
        if (outcome := _decided(records.labelled(label), threshold))
    ]
    if not found:
        return f"{what}."
    return f"{what}: {'; '.join(where + outcome for where, outcome in found)}."


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


def findings(records: Records) -> str:
    """A few sentences with the numbers of one label."""
    parts = (_budget(records), _perplexities(records), _sink(records))
    return " ".join(filter(None, parts))


def _only_evaluated(records: Records) -> bool:
    """Whether no run was trained in these records: `clearhead eval` takes models from anywhere."""
    return not any(run.steps or run.measures for run in records.runs)


def _same_data(records: Records) -> bool:
    """Whether all runs describe the same data."""
    described = [run.header.get("data") for run in records.runs]
    return described[0] is not None and all(one == described[0] for one in described)


def _differences(records: Records) -> dict[str, Difference]:
    """Each variant's perplexity at the training length, less the baseline's."""
    baseline, *variants = records.arms()
    values = _values(records)
    reference = list(values.get(baseline, {}).values())
    compared = {arm: compare(list(values.get(arm, {}).values()), reference) for arm in variants}
    return {arm: difference for arm, difference in compared.items() if difference is not None}


def _values(records: Records) -> dict[str, dict[int, float]]:
    length = records.sequence_length()
    dimensions = {} if length is None else {"length": length}
    values = {arm: records.values(arm, "perplexity", **dimensions) for arm in records.arms()}
    return {arm: found for arm, found in values.items() if found}


def _decided(records: Records, threshold: float) -> str:
    differences = _differences(records)
    if not differences:
        return ""
    if all(one.verdict is Verdict.ONE_SEED for one in differences.values()):
        return "a single seed cannot say which predicts unseen text better"
    baseline = records.arms()[0]
    parts = []
    for wanted, word in ((Verdict.LOWER, "better"), (Verdict.HIGHER, "worse")):
        named = [
            arm
            for arm, one in differences.items()
            if one.verdict is wanted and holds(one, threshold)
        ]
        if named:
            verb = "predicts" if len(named) == 1 else "predict"
            parts.append(f"{enumerate_words(named)} {verb} unseen text {word} than {baseline}")
    if not parts:
        limits = [one.decidable for one in differences.values() if one.decidable is not None]
        return (
            f"no difference to {baseline} exceeds the spread of the seeds, which hides effects of "
            f"up to {style.number(max(limits), 2)} in perplexity"
        )
    return enumerate_words(parts)


def _budget(records: Records) -> str:
    amounts = sorted({amount for run in records.runs if (amount := budget(run)) is not None})
    counts = sorted({len(records.of(arm)) for arm in records.arms()})
    seeds = f"{in_words(counts[-1])} seed{'' if counts[-1] == 1 else 's'}"
    if len(counts) > 1:
        seeds = f"{in_words(counts[0])} to {seeds}"
    several = len(records.arms()) > 1
    who = "Each model" if several else "The model"
    if not amounts and counts == [1] and _only_evaluated(records):
        return ""  # whether a seed was ever chosen, nobody told
    if not amounts:
        return f"{who} was trained with {seeds}."
    same = "the same " if several and len(amounts) == 1 and _same_data(records) else ""
    tokens = " to ".join(dict.fromkeys(style.count(amount) for amount in (amounts[0], amounts[-1])))
    return f"{who} read {same}{tokens} tokens, with {seeds}."


def _perplexities(records: Records) -> str:
    values = _values(records)
    if not values:
        return ""
    means = {arm: sum(found.values()) / len(found) for arm, found in values.items()}
    return f"The validation perplexity is {_listed(means, style.number, 'for')}."


def _listed(means: dict[str, float], write: Callable[[float], str], word: str) -> str:
    """Each arm's number, or, where they are many, the least and the greatest."""
    if len(means) <= MANY:
        return enumerate_words([f"{write(mean)} {word} {arm}" for arm, mean in means.items()])
    least, greatest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return (
        f"between {write(means[least])} {word} {least} and {write(means[greatest])} {word} "
        f"{greatest}"
    )


def _sink(records: Records) -> str:
    """How often the first token wins, against chance."""
    shares = {}
    for arm in records.arms():
        summary = records.summary(arm, "first_token_argmax_share", map="softmax")
        if summary is not None:
            shares[arm] = summary.mean
    if not shares:
        return ""
    listed = _listed(shares, style.percent, "in")
    text = f"The first token gets the largest attention weight of {listed} of all queries and heads"
    floor = chance_floor(records)
    if floor is None:
        return f"{text}."
    text += f", where chance gives {style.percent(floor)}"
    if max(shares.values()) < 2 * floor:
        return f"{text}: no sink on the first token has formed."
    return f"{text}."
