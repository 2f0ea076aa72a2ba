"""Provenance section of a page: facts of the runs' headers."""

import json
from collections.abc import Callable
from typing import Any

from clearhead.records.provenance import source_of
from clearhead.records.runs import Records, Run
from clearhead.report.narrative import sets
from clearhead.report.page import Block, Facts, Fold, Section, Tag

FactsOf = Callable[[Run], dict[str, list[str]]]


def section(records: Records, facts_of: FactsOf | None = None, caption: str = "") -> Section:
    """The last section of a page."""
    blocks: list[Block] = []
    for tag, labelled in sets(records):
        if facts_of is None:
            blocks += [tag, Facts(facts=_merged(labelled, _facts_of))]
            blocks += [_configuration(labelled.of(arm)[0]) for arm in labelled.arms()]
            continue
        for run in labelled.runs:
            only = Records(runs=(run,))
            blocks.append(Tag(label=run.label, name=run.id, facts=""))
            blocks.append(Facts(facts=_merged(only, facts_of)))
    return Section(
        name="made",
        title="How this was made",
        answer="Everything needed to run it again; every number here is from these runs’ records.",
        caption=caption,
        blocks=tuple(blocks),
        folded=True,
    )


def _merged(records: Records, facts_of: FactsOf) -> dict[str, list[str]]:
    """Every value of each fact, once."""
    facts: dict[str, list[str]] = {}
    for run in records.runs:
        for name, values in facts_of(run).items():
            known = facts.setdefault(name, [])
            known.extend(value for value in values if value and value not in known)
    if facts.get("seeds"):
        facts["seeds"] = [", ".join(facts["seeds"])]
    return {name: values for name, values in facts.items() if values}


def _facts_of(run: Run) -> dict[str, list[str]]:
    header = run.header
    made = [cell["made"] for cell in run.cells]
    return {
        "command": [str(header.get("command") or "")],
        "device": [str(one.get("device") or "") for one in (header, *made)],
        "training’s precision": [run.precision or ""],
        "versions": [short(one.get("versions") or {}) for one in (header, *made)],
        "source": [source_of(one) for one in (header, *made)],
        "evaluated": [
            f"in {one['dtype']}, with seed {one['seed']}, {one['batch_tokens']:,} tokens together"
            for one in made
            if "dtype" in one
        ],
        "seeds": [] if Records(runs=(run,)).given else [str(run.seed)],
        "tokens a model": [f"{run.budget:,.0f}"] if run.budget else [],
        "data": [f"{name}: {short(value)}" for name, value in (header.get("data") or {}).items()],
        "date": [str(header.get("date") or "")[:10]],
    }


def of_header(*names: str) -> FactsOf:
    """Facts that are keys of the header."""

    def facts(run: Run) -> dict[str, list[str]]:
        found: dict[str, Any] = {name: run.header.get(name) for name in names}
        found["source"] = source_of(run.header)
        made = [cell["made"] for cell in run.cells]
        if made and found.get("seconds") is None:
            found["seconds"] = round(sum(one.get("seconds", 0.0) for one in made), 1)
            found["peak_memory_bytes"] = max(one.get("peak_memory_bytes", 0) for one in made)
        for name in names:
            if name.endswith("_bytes") and found[name]:
                found[name] = f"{found[name] / 2**20:,.0f} MiB"
        return {
            name.removesuffix("_bytes").replace("_", " "): [short(value)]
            for name, value in found.items()
            if value
        }

    return facts


def short(value: Any) -> str:
    """A value of a record in one line: 1,690 or train 1,690, validation 34."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(short, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _configuration(run: Run) -> Fold:
    names = ("size", "model", "train", "evaluation")
    settings = {name: value for name in names if (value := run.header.get(name))}
    text = json.dumps(settings, indent=2, ensure_ascii=False, default=str)
    return Fold(summary=f"Configuration of {run.arm}", text=text)
