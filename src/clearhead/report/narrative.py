"""Words of a page: names of records, and a sentence that has a row of a table."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from clearhead.records.provenance import source_of
from clearhead.records.runs import Records, Run
from clearhead.report import style
from clearhead.report.page import Block, Facts, Fold, Section
from clearhead.report.pivots import Quantity, models, without_seeds
from clearhead.report.statistics import LEVEL, verdict_in_words

MANY = 6  # arms: beyond, a sentence names the reference and the ends alone
SETTINGS = ("size", "model", "train", "evaluation")
# Keys of a header and of cells that are shown as they are.
SHOWN = (
    *("command", "device", "versions", "source", "path", "class", "architecture", "parameters"),
    *("quantized_parameters", "dtype", "windows", "length", "tokens", "calibration", "data"),
    "date",
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
    for label, group in groupby(models(records), lambda model: model.heading.group):
        means = {model: over.mean for model in group if (over := quantity.summary(model))}
        ends = [pick(means, key=means.__getitem__) for pick in (min, max) if means]
        named = [
            model
            for model in means
            if len(means) <= MANY or model in ends or model.arm == model.reference
        ]
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
    return f"{what}: {'. '.join(parts)}{more}." if parts else ""


def chance(records: Records) -> str:
    """`; chance 1.3 %`: the argmax share of attention without any preference, where it is known."""
    values = [run.value("chance_floor") for run in records.runs]
    known = [value for value in values if value is not None]
    return f"; chance {style.percent(sum(known) / len(known))}" if known else ""


def provenance(records: Records) -> Section:
    """The last section of a page: facts of the runs' headers."""
    blocks: list[Block] = []
    for label in records.labels():
        labelled = records.labelled(label)
        facts: dict[str, dict[str, None]] = {"records": {label: None}} if label else {}
        for run in labelled.runs:
            for name, value in _facts_of(run, seeds=not without_seeds(labelled)):
                facts.setdefault(name, {})[value] = None
        blocks.append(Facts({name: list(values) for name, values in facts.items()}))
        for arm in labelled.arms():
            header = labelled.of(arm)[0].header
            if settings := known({name: header.get(name) or None for name in SETTINGS}):
                text = json.dumps(settings, indent=2, ensure_ascii=False, default=str)
                blocks.append(Fold(f"Configuration of {arm}", text))
    answer = "Everything needed to run it again; every number here is from these runs’ records."
    return Section("made", "How this was made", blocks, answer=answer, folded=True)


def _facts_of(run: Run, *, seeds: bool) -> list[tuple[str, str]]:
    header, cells = run.header, [cell["made"] for cell in run.cells]
    lines = [{**one, "source": source_of(one)} for one in (header, *cells)]
    facts = [(name.replace("_", " "), one.get(name)) for name in SHOWN for one in lines]
    facts.append(("training’s precision", run.precision))
    facts += [("seeds", str(run.seed))] * seeds
    facts.append(("tokens a model", f"{run.budget:,.0f}" if run.budget else ""))
    return [(name, text) for name, value in facts if value and (text := short(known(value)))]


def known(value: Any) -> Any:
    """Settings without those that are None."""
    if isinstance(value, dict):
        return {name: known(item) for name, item in value.items() if item is not None}
    return [known(one) for one in value if one is not None] if isinstance(value, list) else value


def short(value: Any) -> str:
    """A value of a record in one line: 1,690 or train 1,690, validation 34."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(short, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
