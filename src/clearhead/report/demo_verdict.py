"""Results of the demo: its records by part, and sentences about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report import style
from clearhead.report.diagnosis import outlier
from clearhead.report.narrative import chance_floor, enumerate_words, means
from clearhead.report.statistics import Difference, Verdict, compare

COARSE = "w8a8-coarse"  # 8 bits, a scale a tensor
MASS = "first_token_mass"
SAME = 1.02  # of the perplexity within the training length
BASE, SHAPED, ALIBI, COCA = "transformer", "sas-p", "alibi", "coca"
# File in results/ → what it is called on the page, and the models shown of it.
LONGER: dict[str, tuple[str, tuple[str, ...]]] = {
    "passkey.jsonl": ("passkeys, 1.5 M tokens a model", (BASE, ALIBI, COCA)),
    "blocks.jsonl": ("8.2 M tokens a model, rates tuned", (BASE, SHAPED)),
    "backcopy-diagnoses.jsonl": ("the same made text, 4.1 M tokens a model", (BASE, "softmax1")),
    "orthoadam.jsonl": (
        "OrthoAdam with one rotation a size, 2 M tokens a model",
        ("transformer · adamw", "transformer · orthoadam"),
    ),
    "smollm2-diagnosis.jsonl": ("SmolLM2-135M, measured before", ()),
    "smollm2-bits.jsonl": ("SmolLM2-135M, measured before", ()),
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The records of the demo: this run's by part, and longer ones by file."""

    text: Records
    sinks: Records
    bits: Records
    pretrained: tuple[Records, ...] = ()
    longer: Mapping[str, Records] = field(default_factory=dict)

    def beside(self, name: str) -> Records:
        """The runs of a longer record that the page shows, under its name."""
        label, arms = LONGER[name]
        runs = self.longer[name].runs if name in self.longer else ()
        return Records(
            runs=tuple(
                replace(run, label=f"longer record: {label}")
                for run in runs
                if run.arm in arms or not arms
            )
        )

    @property
    def all(self) -> Records:
        """Every run that the page shows."""
        records = (self.text, self.sinks, self.bits, *self.pretrained, *map(self.beside, LONGER))
        return Records(runs=tuple(run for one in records for run in one.runs))


def only(records: Records, *arms: str) -> Records:
    """The runs of these arms."""
    return Records(runs=tuple(run for run in records.runs if run.arm in arms))


def by_model(parts: Parts) -> dict[tuple[str, str], list[Records]]:
    """The diagnosis and the quantisation of each model, by name and label."""
    longer = [parts.beside(f"smollm2-{study}.jsonl") for study in ("diagnosis", "bits")]
    found: dict[tuple[str, str], list[Records]] = {}
    for records in (parts.bits, *parts.pretrained, *longer):
        for place in dict.fromkeys((run.arm, run.label) for run in records.runs):
            found.setdefault(place, []).append(only(records, place[0]))
    return found


def added(run: Run) -> list[Measure]:
    """The share that 8 bits add to perplexity."""
    full, coarse = run.value("perplexity"), run.value("perplexity", scheme=COARSE)
    if full is None or coarse is None:
        return []
    return [Measure(metric="added", value=coarse / full - 1)]


def verdict(parts: Parts) -> list[str]:
    """The outcome in plain words."""
    paragraphs = ((_lengths(parts.text), _blocks(parts.text)), (_sinks(parts.sinks), _bits(parts)))
    return [" ".join(filter(None, one)) for one in paragraphs if any(one)]


def _lengths(text: Records) -> str:
    within, beyond = (means(text, "perplexity", length=length) for length in _ends(text))
    if not {BASE, ALIBI} <= within.keys() & beyond.keys():
        return ""
    worse = {arm: beyond[arm] > SAME * within[arm] for arm in (BASE, ALIBI)}
    if not worse[BASE]:
        return "In this run the standard Transformer reads texts longer than in training well."
    said = "On texts longer than in training the standard Transformer gets worse"
    found = _against_base(text, ALIBI, "perplexity", length=_ends(text)[1])
    if found is not None and found.verdict is Verdict.LOWER and not worse[ALIBI]:
        return f"{said}; ALiBi repairs that."
    return f"{said}; in this run ALiBi is not shown to repair that."


def _blocks(text: Records) -> str:
    if not {BASE, SHAPED} <= set(text.arms()):
        return ""
    less = 1 - _parameters(text, SHAPED) / _parameters(text, BASE)
    return (
        f"SAS-P, a block without skips, value and projection matrices, has {style.percent(less)} "
        f"fewer parameters and, this early in training, learns {_learnt(text)} it."
    )


def _learnt(text: Records) -> str:
    words = {Verdict.LOWER: "better than", Verdict.HIGHER: "less well than"}
    found = _against_base(text, SHAPED, "perplexity", length=text.sequence_length())
    return words.get(found.verdict, "as well as") if found else "as well as"


def _sinks(sinks: Records) -> str:
    floor, found = chance_floor(sinks), means(sinks, MASS, map="softmax")
    if floor is None or BASE not in found:
        return ""
    if found[BASE] < 2 * floor:
        return "In this run no attention sink has formed."
    said = (
        "Where heads have nothing to do they park their weight on the first token, a sink: "
        f"{style.percent(found[BASE])} of it, where equal weights have {style.percent(floor)}"
    )
    others = [arm for arm in found if arm != BASE]
    differences = {arm: _against_base(sinks, arm, MASS, map="softmax") for arm in others}
    verdicts = {arm: one.verdict for arm, one in differences.items() if one is not None}
    words = {Verdict.LOWER: "less", Verdict.HIGHER: "more"}
    outcomes = [
        f"{word} with {enumerate_words(arms)}"
        for verdict, word in words.items()
        if (arms := [arm for arm in others if verdicts.get(arm) is verdict])
    ]
    if rest := [arm for arm in others if verdicts.get(arm) not in words]:
        seen = [one.decidable for arm in rest if (one := differences[arm]) and one.decidable]
        least = f" (±{style.percent(max(seen))})" if seen else ""
        outcomes.append(f"undecided with {enumerate_words(rest)}{least}")
    if Verdict.LOWER not in verdicts.values():
        said += "; in this run no remedy reliably lessens it"
    return f"{said} ({'; '.join(outcomes)})." if outcomes else f"{said}."


def _bits(parts: Parts) -> str:
    said = "Outliers, which ruin 8-bit numbers, do not show in models this small"
    real = {name: found for name, found in _changes(parts).items() if name != (BASE, "")}
    costs = [
        f"in {arm} they are {ratio:,.0f} times the median, and 8 bits add {style.percent(change)} "
        f"to perplexity{' (a longer record)' if label else ''}"
        for (arm, label), (change, ratio) in real.items()
        if ratio is not None
    ]
    return f"{'; '.join([said, *costs])}." if parts.bits.runs else ""


def lengths(text: Records) -> str:
    """Perplexity within the training length and at the longest."""
    within, beyond = (means(text, "perplexity", length=length) for length in _ends(text))
    rises = [
        f"{arm} from {style.number(within[arm])} to {style.number(beyond[arm])}"
        for arm in (BASE, ALIBI, COCA)
        if arm in within and arm in beyond
    ]
    trained, longest = _ends(text)
    where = f"from {trained:,} tokens, the length of training, to {longest:,}"
    return f"Perplexity {where}: {enumerate_words(rises)}." if rises else ""


def blocks(text: Records) -> str:
    """Perplexity and parameters of the two blocks."""
    found = means(text, "perplexity", length=text.sequence_length())
    each = [
        f"{style.number(found[arm])} for {arm} with {_parameters(text, arm) / 1e6:.2f} M parameters"
        for arm in (SHAPED, BASE)
        if arm in found
    ]
    return f"Perplexity is {enumerate_words(each)}." if each else ""


def sinks(records: Records) -> str:
    """Weight on the first token under each remedy."""
    found = means(records, MASS, map="softmax")
    each = [f"{style.percent(found[arm])} in {arm}" for arm in found]
    return f"The first token gets {enumerate_words(each)} of all attention." if each else ""


def bits(parts: Parts) -> str:
    """Changes of perplexity in 8 bits."""
    each = [
        f"{'+' if change >= 0 else '−'}{style.percent(abs(change))} in {arm}"
        for (arm, _), (change, _) in _changes(parts).items()
    ]
    return f"8 bits change perplexity by {enumerate_words(each)}." if each else ""


def _changes(parts: Parts) -> dict[tuple[str, str], tuple[float, float | None]]:
    """The share that 8 bits add, and the largest hidden number in medians, of each model."""
    found = {}
    for place, studies in by_model(parts).items():
        runs = [run for each in studies for run in each.runs]
        changes = [one.value for run in runs for one in added(run) if one.value is not None]
        ratios = [one.value for run in runs for one in outlier(run)]
        if changes:
            found[place] = fmean(changes), ratios[0] if ratios else None
    return found


def _ends(text: Records) -> tuple[int, int]:
    """The training length, and the longest that was read."""
    trained = text.sequence_length() or 0
    return trained, max(text.dimension("perplexity", "length", task=None), default=trained)


def _parameters(text: Records, arm: str) -> int:
    return int(text.of(arm)[0].header["parameters"])


def _against_base(records: Records, arm: str, metric: str, **dimensions: Any) -> Difference | None:
    """Difference of an arm to the baseline; None where one lacks the measure."""
    mine, theirs = (list(records.values(one, metric, **dimensions).values()) for one in (arm, BASE))
    return compare(mine, theirs)
