"""Records to tables, figures and one page. Nothing here trains or measures."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.report.contrasts import compare_all
    from clearhead.report.milestones import at_equal_loss
    from clearhead.report.page import write_page
    from clearhead.report.records import Records, Run, append, load
    from clearhead.report.tables import comparison, to_console

__all__ = [
    "Records",
    "Run",
    "append",
    "at_equal_loss",
    "compare_all",
    "comparison",
    "load",
    "to_console",
    "write_page",
]

__getattr__ = lazily(__name__)
