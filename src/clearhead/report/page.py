"""One self-contained page: opens offline, asks nothing of the network, runs nothing from data."""

import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from string import Template

from clearhead.errors import ClearheadError
from clearhead.records.files import write_text
from clearhead.report import narrative, sections, style
from clearhead.report.records import Records

# Scripts run only by their hash, so that no text of a record can ever become one. Plotly writes
# styles at run time and draws heat-maps as data: images.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def write_page(records: Records, path: Path, *, title: str) -> None:
    """Write the report on `records` to `path`: whole or not at all.

    Raises:
        ClearheadError: the file cannot be written.
    """
    write_text(path, render(records, title=title))


def render(records: Records, *, title: str) -> str:
    """The page as HTML text."""
    page = sections.Page(records=records, looks=style.looks(records.arms()))
    body = sections.build(page) if records.runs else ""
    return shell(page, title=title, lead=_lead(records, page.contrasts.threshold), body=body)


def shell(page: sections.Page, *, title: str, lead: str, body: str) -> str:
    """A page as HTML text: `lead` and `body` are HTML, `title` is text."""
    from plotly.offline import get_plotlyjs

    data = {
        "figures": page.figures,
        "key": page.key,
        "attention": page.attention,
        "dark": style.LIGHT_TO_DARK,
    }
    plotly, script = _script(get_plotlyjs()), _script(_part("page.js"))
    policy = _POLICY.format(scripts=" ".join(map(_hash, (plotly, script))))
    return Template(_part("page.html")).substitute(
        title=html.escape(title),
        policy=html.escape(policy),
        css=_part("page.css"),
        lead=lead,
        body=body,
        data=embed(data),
        plotly=plotly,
        script=script,
    )


def embed(data: object) -> str:
    """JSON that is safe between script tags: nothing in it can close or open one."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _lead(records: Records, threshold: float) -> str:
    """The lead sentence, and under it the findings of each set of records side by side."""
    findings = "".join(
        f'<div class="{"committed" if label else "now"}">'
        f"<b>{html.escape(narrative.record_name(label))}</b>"
        f"<p>{html.escape(found)}</p></div>"
        for label in records.labels()
        if (found := narrative.findings(records.labelled(label)))
    )
    below = f'<div class="findings">{findings}</div>' if findings else ""
    return f'<p class="lead">{html.escape(narrative.lead(records, threshold))}</p>{below}'


def _part(name: str) -> str:
    return resources.files("clearhead.report").joinpath(name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """Script text ready to stand between tags; plotly's is safe today, a future one may not be."""
    if "</script" in text.lower() or "<!--" in text:
        raise ClearheadError(
            "this version of plotly cannot be put into a page: its script holds a closing tag; "
            "install the version in constraints.txt"
        )
    return text.replace("\r\n", "\n")  # as a browser reads it before it takes the hash


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
