"""One protocol of measurements, and one resumable sweep of them."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.measure.documents import Document as Document
    from clearhead.measure.documents import Texts as Texts
    from clearhead.measure.sweep import Portion as Portion
    from clearhead.measure.task import Subject as Subject
    from clearhead.measure.task import Task as Task


__getattr__, __all__ = lazily(__name__)
