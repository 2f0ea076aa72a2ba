"""Records to tables, figures and one page. Nothing here trains or measures."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.records.loading import append, load
    from clearhead.records.runs import Measure, Records, Run
    from clearhead.report.console import to_console
    from clearhead.report.page import Page, render, write_page
    from clearhead.report.publishing import page_of

__all__ = [
    "Measure",
    "Page",
    "Records",
    "Run",
    "append",
    "load",
    "page_of",
    "render",
    "to_console",
    "write_page",
]

__getattr__ = lazily(__name__)
