"""Words of a page: names of records, and a sentence that has a row of a table."""

import json
from collections.abc import Sequence
from itertools import groupby

from clearhead.records.provenance import source_of
from clearhead.records.runs import Records
from clearhead.report import style
from clearhead.report.page import Block, Facts, Fold, Section
from clearhead.report.pivots import Quantity, models
from clearhead.report.statistics import LEVEL, verdict_in_words

MANY = 6  # arms: beyond, a sentence names the reference and the ends alone
# Keys of a header and of cells that are in sight; the others stand in the header.
SHOWN = ("command", "device", "versions", "source", "path", "dtype", "date")


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


def answer(
    records: Records, quantity: Quantity, threshold: float = LEVEL, alone: str = "", more: str = ""
) -> str:
    """`TITLE: transformer 14.0 ± 0.2; differential 13.1 ± 0.1, lower by 0.9.`; "" without a number.
    One model is `alone` in a sentence of its own, such as "{} of all queries"; `more` ends it."""
    parts = []
    for label, group in groupby(models(records), lambda model: model.group):
        means = {model: over.mean for model in group if (over := quantity.summary(model))}
        ends = [pick(means, key=means.__getitem__) for pick in (min, max) if means]
        few = len(means) <= MANY
        named = [one for one in means if few or one in ends or one.arm == one.reference]
        sentences = []
        for model in named:
            for entry in quantity.entries(model):
                if alone and len(records.arms()) == 1:
                    return f"{alone.format(entry.text)}{more}."
                verdict = entry.difference and verdict_in_words(entry.difference, threshold)
                sentences.append(f"{model.arm} {entry.text}{f', {verdict}' if verdict else ''}")
        sentences += [f"{len(means) - len(named)} more between them"] * (len(means) > len(named))
        where = f"{label[:1].upper()}{label[1:]}: " if len(records.labels()) > 1 else ""
        parts += [where + "; ".join(sentences)] if sentences else []
    return f"{quantity.title}: {'. '.join(parts)}{more}." if parts else ""


def chance(records: Records) -> str:
    """`; chance 1.3 %`: the argmax share of attention without any preference, where it is known."""
    floors = (run.value("chance_floor") for run in records.runs)
    known = [floor for floor in floors if floor is not None]
    return f"; chance {style.percent(sum(known) / len(known))}" if known else ""


def provenance(records: Records) -> Section:
    """The last section of a page: how its runs were made, and the header of each model's first."""
    facts: dict[str, dict[str, None]] = {name: {} for name in SHOWN}
    for run in records.runs:
        for one in (run.header, *(cell["made"] for cell in run.cells)):
            for name, value in {**one, "source": source_of(one)}.items():
                if name in SHOWN and value:
                    items = value.items() if isinstance(value, dict) else ()
                    words = ", ".join(f"{part} {item}" for part, item in items) or str(value)
                    facts[name][words] = None
    blocks: list[Block] = [Facts({name: [*values] for name, values in facts.items() if values})]
    for model in models(records):
        header = model.records.of(model.arm)[0].header
        name = ", ".join(filter(None, (model.group, model.arm)))
        text = json.dumps(header, indent=2, ensure_ascii=False, default=str)
        blocks.append(Fold(f"Record of {name}", text))
    answer = "Everything needed to run it again; every number here is from these runs’ records."
    return Section("made", "How this was made", blocks, answer=answer, folded=True)
