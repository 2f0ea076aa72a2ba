"""What a page says in words: plain text built from the records, not yet escaped."""

from collections.abc import Sequence

from clearhead.report import style
from clearhead.report.records import Records, Run
from clearhead.report.statistics import Verdict, compare
from clearhead.report.tables import chance_floor

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


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


def lead(records: Records) -> str:
    """The first sentence: what was compared, and what came out in each set of records."""
    presets = records.presets()
    if not presets:
        return "There are no records yet."
    if len(presets) == 1:
        what = f"One language model, {presets[0]}, was trained and measured"
    else:
        number = in_words(len(presets)).capitalize()
        shared = all(_same_data(records.labelled(label)) for label in records.labels())
        what = f"{number} language models, {enumerate_words(presets)}, were trained"
        what += " on the same text" if shared else ""
    found = [
        (f"in {'this run' if not label else f'“{label}”'} ", outcome)
        for label in records.labels()
        if (outcome := _decided(records.labelled(label)))
    ]
    if not found:
        return f"{what}."
    return f"{what}: {'; '.join(where + outcome for where, outcome in found)}."


def findings(records: Records) -> str:
    """A few sentences with the numbers of one label."""
    parts = (_budget(records), _perplexities(records), _sink(records))
    return " ".join(filter(None, parts))


def _same_data(records: Records) -> bool:
    """Whether all runs describe the same data."""
    described = [run.header.get("data") for run in records.runs]
    return described[0] is not None and all(one == described[0] for one in described)


def _verdicts(records: Records) -> dict[str, Verdict]:
    """What the seeds say of each variant's perplexity at the training length."""
    baseline, *variants = records.presets()
    values = _values(records)
    if baseline not in values:
        return {}
    return {
        preset: compare(values[preset], values[baseline]).verdict
        for preset in variants
        if preset in values
    }


def _values(records: Records) -> dict[str, dict[int, float]]:
    length = records.sequence_length()
    dimensions = {} if length is None else {"length": length}
    values = {
        preset: records.values(preset, "perplexity", **dimensions) for preset in records.presets()
    }
    return {preset: found for preset, found in values.items() if found}


def _decided(records: Records) -> str:
    verdicts = _verdicts(records)
    if not verdicts:
        return ""
    if all(verdict is Verdict.ONE_SEED for verdict in verdicts.values()):
        return "a single seed cannot say which predicts unseen text better"
    baseline = records.presets()[0]
    parts = []
    for wanted, word in ((Verdict.LOWER, "better"), (Verdict.HIGHER, "worse")):
        named = [preset for preset, verdict in verdicts.items() if verdict is wanted]
        if named:
            verb = "predicts" if len(named) == 1 else "predict"
            parts.append(f"{enumerate_words(named)} {verb} unseen text {word} than {baseline}")
    if not parts:
        return f"no difference to {baseline} exceeds the spread of the seeds"
    return enumerate_words(parts)


def _budget(records: Records) -> str:
    amounts = sorted({amount for run in records.runs if (amount := budget(run)) is not None})
    counts = sorted({len(records.of(preset)) for preset in records.presets()})
    seeds = f"{in_words(counts[-1])} seed{'' if counts[-1] == 1 else 's'}"
    if len(counts) > 1:
        seeds = f"{in_words(counts[0])} to {seeds}"
    several = len(records.presets()) > 1
    who = "Each model" if several else "The model"
    if not amounts:
        return f"{who} was trained with {seeds}."
    same = "the same " if several and len(amounts) == 1 and _same_data(records) else ""
    tokens = " to ".join(dict.fromkeys(style.count(amount) for amount in (amounts[0], amounts[-1])))
    return f"{who} read {same}{tokens} tokens, with {seeds}."


def _perplexities(records: Records) -> str:
    values = _values(records)
    if not values:
        return ""
    listed = enumerate_words(
        [
            f"{style.number(sum(found.values()) / len(found))} for {preset}"
            for preset, found in values.items()
        ]
    )
    return f"The validation perplexity is {listed}."


def _sink(records: Records) -> str:
    """How often the first token wins, against chance."""
    shares = []
    for preset in records.presets():
        summary = records.summary(preset, "first_token_argmax_share", map="softmax")
        if summary is not None:
            shares.append((preset, summary.mean))
    if not shares:
        return ""
    listed = enumerate_words([f"{style.percent(share)} in {preset}" for preset, share in shares])
    text = f"The first token gets the largest attention weight of {listed} of all queries and heads"
    floor = chance_floor(records)
    if floor is None:
        return f"{text}."
    text += f", where chance gives {style.percent(floor)}"
    if max(share for _, share in shares) < 2 * floor:
        return f"{text}: no sink on the first token has formed."
    return f"{text}."
