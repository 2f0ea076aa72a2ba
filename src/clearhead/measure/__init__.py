"""One protocol of measurements, and one resumable sweep of them."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.measure.documents import Document, Texts
    from clearhead.measure.sweep import Portion, Watcher
    from clearhead.measure.task import Subject, Task

__all__ = ["Document", "Portion", "Subject", "Task", "Texts", "Watcher"]

__getattr__ = lazily(__name__)
