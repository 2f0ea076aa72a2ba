"""The viewer: attention, hidden states and predictions of one text, on a page to click through.

`observe_text` runs a model on a text and packs all that the page shows; `render` makes the page.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.view.observation import Observation, observe_text
    from clearhead.view.page import render

__all__ = ["Observation", "observe_text", "render"]

__getattr__ = lazily(__name__)
