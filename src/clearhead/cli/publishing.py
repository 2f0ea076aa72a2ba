"""Pages of records, and their first table in the terminal."""

from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.records.files import write_text
from clearhead.records.loading import load, parse
from clearhead.report import Page, page_of, render, to_console
from clearhead.terminal import console, say, show


def publish(page: Page, output: Path | None = None) -> int:
    """Write a page to `output` if given, and print its first table and verdict; return the exit
    status, 1 for numbers not finite."""
    if output is not None:
        write_text(output, render(page))
    out = console()
    for part in to_console(page, out.width):
        out.print(part)
    if not page.records.finite:
        say("clearhead: some numbers are not finite")
    if output is not None:
        show(f"page: {output}")
    return int(not page.records.finite)


def publish_sweep(config: Any, output: Path | None, file: Path | None = None) -> int:
    """Measure the models of an eval, a diagnosis or a quantisation, and publish what was measured,
    or all that `file` then holds; of a refusal midway the table of what came before it."""
    from clearhead.lab.measuring import measure
    from clearhead.progress import Line

    lines: list[dict[str, Any]] = []
    try:
        with Line(unit="cell") as work:
            measure(config, work=work, lines=lines)
    except ClearheadError:
        if lines:
            publish(page_of(parse(lines)))
        raise
    return publish(page_of(load(file) if file else parse(lines)), output)
