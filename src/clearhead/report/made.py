"""How the records of a page were made."""

import html
import json
from typing import Any

from clearhead.records.provenance import source_of
from clearhead.report import narrative
from clearhead.report.records import Records, Run


def facts(records: Records) -> str:
    """Commands, devices, versions, data and configurations as HTML, each once."""
    found: dict[str, list[str]] = {}
    for run in records.runs:
        for name, values in _facts_of(run).items():
            known = found.setdefault(name, [])
            known.extend(value for value in values if value and value not in known)
    if found:
        found["seeds"] = [", ".join(found["seeds"])]
    items = "".join(
        f"<dt>{html.escape(name)}</dt>"
        + "".join(f"<dd>{_value(name, value)}</dd>" for value in values)
        for name, values in found.items()
        if values
    )
    configs = "".join(_config(records.of(arm)[0]) for arm in records.arms())
    return f"<dl>{items}</dl>{configs}"


def _facts_of(run: Run) -> dict[str, list[str]]:
    header = run.header
    read = narrative.budget(run)
    made = [cell["made"] for cell in run.cells]
    return {
        "command": [str(header.get("command") or "")],
        "device": [str(one.get("device") or "") for one in (header, *made)],
        "versions": [_short(one.get("versions") or {}) for one in (header, *made)],
        "source": [source_of(one) for one in (header, *made)],
        "evaluated": [
            f"in {one['dtype']}, with seed {one['seed']}, {one['batch_tokens']:,} tokens together"
            for one in made
            if "dtype" in one
        ],
        "seeds": [str(run.seed)],
        "tokens a model": [] if read is None else [f"{read:,.0f}"],
        "data": [f"{name}: {_short(value)}" for name, value in (header.get("data") or {}).items()],
        "date": [str(header.get("date") or "")[:10]],
    }


def _short(value: Any) -> str:
    """A value of a record in one line: 1,690 or train 1,690, validation 34."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _value(name: str, value: str) -> str:
    text = html.escape(value)
    return f"<pre>{text}</pre>" if name == "command" else text


def _config(run: Run) -> str:
    names = ("size", "model", "train", "evaluation")
    settings = {name: value for name in names if (value := run.header.get(name))}
    text = json.dumps(settings, indent=2, ensure_ascii=False, default=str)
    return (
        f"<details><summary>Configuration of {html.escape(run.arm)}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
    )
