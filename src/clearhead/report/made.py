"""Provenance section of a page: facts of the runs' headers."""

import json
from typing import Any

from clearhead.records.provenance import source_of
from clearhead.records.runs import Records, Run
from clearhead.report.narrative import sets
from clearhead.report.page import Block, Facts, Fold, Section
from clearhead.report.quantities import no_seed_varies

SETTINGS = ("size", "model", "train", "evaluation")
# Keys of a header, and those of a cell, that are shown as they are.
SHOWN = (
    *("path", "class", "architecture", "parameters", "quantized_parameters", "dtype", "windows"),
    *("length", "tokens", "calibration"),
)


def section(records: Records, caption: str = "") -> Section:
    """The last section of a page."""
    blocks: list[Block] = []
    for tag, labelled in sets(records):
        facts: dict[str, dict[str, None]] = {}
        given = labelled.given or no_seed_varies(labelled)
        for run in labelled.runs:
            for name, value in _facts_of(run, given=given):
                facts.setdefault(name, {})[value] = None
        blocks += [tag, Facts(facts={name: list(values) for name, values in facts.items()})]
        for arm in labelled.arms():
            header = labelled.of(arm)[0].header
            if settings := {name: header[name] for name in SETTINGS if header.get(name)}:
                text = json.dumps(settings, indent=2, ensure_ascii=False, default=str)
                blocks.append(Fold(summary=f"Configuration of {arm}", text=text))
    return Section(
        name="made",
        title="How this was made",
        answer="Everything needed to run it again; every number here is from these runs’ records.",
        caption=caption,
        blocks=tuple(blocks),
        folded=True,
    )


def _facts_of(run: Run, *, given: bool) -> list[tuple[str, str]]:
    header = run.header
    cells = [cell["made"] for cell in run.cells]
    lines = [header, *cells]
    facts: list[tuple[str, Any]] = [
        ("command", header.get("command")),
        *(("device", one.get("device")) for one in lines),
        *(("versions", one.get("versions")) for one in lines),
        *(("source", source_of(one)) for one in lines),
        ("training’s precision", run.precision),
        *((name.replace("_", " "), header.get(name)) for name in SHOWN),
        *(("computed in", one.get("dtype")) for one in cells),
        ("seeds", "" if given else str(run.seed)),
        ("tokens a model", f"{run.budget:,.0f}" if run.budget else ""),
        *(("data", f"{name}: {short(one)}") for name, one in (header.get("data") or {}).items()),
        ("date", str(header.get("date") or "")[:10]),
    ]
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
