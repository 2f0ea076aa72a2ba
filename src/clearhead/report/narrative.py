"""Words of a page: names of records, and a sentence that has a row of a table."""

import json
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from clearhead.records.provenance import source_of
from clearhead.records.runs import Records, Run
from clearhead.report import style
from clearhead.report.page import Block, Facts, Fold, Section, Tag
from clearhead.report.pivots import Quantity, by_seed, seeds_in_words, without_seeds
from clearhead.report.statistics import LEVEL
from clearhead.report.verdicts import verdict_in_words

Maker = Callable[[Records], Block | None]
MANY = 6  # arms: beyond, a sentence names the reference and the ends alone
SETTINGS = ("size", "model", "train", "evaluation")
# Keys of a header and of cells that are shown as they are.
SHOWN = (
    *("command", "device", "versions", "source", "path", "class", "architecture", "parameters"),
    *(
        "quantized_parameters",
        "dtype",
        "windows",
        "length",
        "tokens",
        "calibration",
        "data",
        "date",
    ),
)


def enumerate_words(words: Sequence[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def title_of(records: Records) -> str:
    """The models by name, as a page's title."""
    arms = records.arms()
    if len(arms) <= MANY:
        return enumerate_words(arms) if arms else "No records"
    return f"{arms[0]} and {len(arms) - 1} others"


def text_in_words(records: Records) -> str:
    """on books.jsonl (held-out part): the text that was read; "" where records do not say."""
    texts: dict[str, None] = {}
    for run in records.runs:
        data, settings = (run.header.get(name) or {} for name in ("data", "evaluation"))
        specs = [str(one["spec"]) for one in data.get("sources") or () if isinstance(one, dict)]
        part = "" if settings.get("split") == "all" else " (held-out part)"
        texts |= {", ".join(specs) + part: None} if specs else {}
    return f" on {'; '.join(texts)}" if texts else ""


def sets(records: Records) -> Iterator[tuple[Tag, Records]]:
    """The records of each label under its mark."""
    for label in records.labels():
        labelled = records.labelled(label)
        amount = max((run.budget or 0.0 for run in labelled.runs), default=0.0)
        facts = [f"{style.count(amount)} tokens a model"] if amount else []
        if not without_seeds(labelled):
            facts.append(seeds_in_words(max(len(labelled.of(arm)) for arm in labelled.arms())))
        name = label[:1].upper() + label[1:] or "This run"
        yield Tag(label, name, " · ".join(facts)), labelled


def each(records: Records, *makers: Maker) -> Iterator[Block]:
    """The tables and figures of each set of records, under its mark."""
    for tag, labelled in sets(records):
        blocks = [block for make in makers if (block := make(labelled)) is not None]
        yield from [tag, *blocks] if blocks else []


def answer(
    records: Records,
    what: str,
    quantity: Quantity,
    *,
    threshold: float = LEVEL,
    alone: str = "",
    more: str = "",
) -> str:
    """`WHAT: transformer 14.0 ± 0.2; differential 13.1 ± 0.1, lower by 0.9.`; "" without a number.

    Numbers and differences are those of a table, by label where there are several.

    Args:
        threshold: the largest p of a difference that holds among all that are shown.
        alone: the sentence of one model, whose name is the page's title: "{} of all queries".
        more: the end of the sentence.
    """
    parts = []
    for tag, labelled in sets(records):
        every = {arm: by_seed(quantity.found(labelled, arm)) for arm in labelled.arms()}
        means = {arm: fmean(values) for arm, values in every.items() if values}
        reference = labelled.arms()[0]
        ends = [pick(means, key=means.__getitem__) for pick in (min, max) if means]
        named = [arm for arm in means if len(means) <= MANY or arm in (reference, *ends)]
        sentences = []
        for arm in named:
            for entry in quantity.entries(labelled, arm, reference):
                if alone and len(records.arms()) == 1:
                    return f"{alone.format(entry.text)}{more}."
                verdict = entry.difference and verdict_in_words(entry.difference, threshold)
                sentences.append(f"{arm} {entry.text}{f', {verdict}' if verdict else ''}")
        sentences += [f"{len(means) - len(named)} more between them"] * (len(means) > len(named))
        where = f"{tag.name}: " if len(records.labels()) > 1 else ""
        parts += [where + "; ".join(sentences)] if sentences else []
    return f"{what}: {'. '.join(parts)}{more}." if parts else ""


def chance(records: Records) -> str:
    """`; chance 1.3 %`: the argmax share of attention without any preference, where it is known."""
    values = [run.value("chance_floor") for run in records.runs]
    known = [value for value in values if value is not None]
    return f"; chance {style.percent(sum(known) / len(known))}" if known else ""


def provenance(records: Records, caption: str = "") -> Section:
    """The last section of a page: facts of the runs' headers."""
    blocks: list[Block] = []
    for tag, labelled in sets(records):
        facts: dict[str, dict[str, None]] = {}
        for run in labelled.runs:
            for name, value in _facts_of(run, seeds=not without_seeds(labelled)):
                facts.setdefault(name, {})[value] = None
        blocks += [tag, Facts({name: list(values) for name, values in facts.items()})]
        for arm in labelled.arms():
            header = labelled.of(arm)[0].header
            if settings := {name: header[name] for name in SETTINGS if header.get(name)}:
                text = json.dumps(settings, indent=2, ensure_ascii=False, default=str)
                blocks.append(Fold(f"Configuration of {arm}", text))
    return Section(
        name="made",
        title="How this was made",
        answer="Everything needed to run it again; every number here is from these runs’ records.",
        caption=caption,
        blocks=tuple(blocks),
        folded=True,
    )


def _facts_of(run: Run, *, seeds: bool) -> list[tuple[str, str]]:
    header, cells = run.header, [cell["made"] for cell in run.cells]
    lines = [{**one, "source": source_of(one)} for one in (header, *cells)]
    facts = [(name.replace("_", " "), one.get(name)) for name in SHOWN for one in lines]
    facts.append(("training’s precision", run.precision))
    facts += [("seeds", str(run.seed))] * seeds
    facts.append(("tokens a model", f"{run.budget:,.0f}" if run.budget else ""))
    return [(name, short(value)) for name, value in facts if value]


def short(value: Any) -> str:
    """A value of a record in one line: 1,690 or train 1,690, validation 34."""
    if isinstance(value, dict):
        known = {name: item for name, item in value.items() if item is not None}
        return ", ".join(f"{name} {short(item)}" for name, item in known.items())
    if isinstance(value, list):
        return ", ".join(short(one) for one in value if one is not None)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
