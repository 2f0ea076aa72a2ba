"""The viewer: attention, hidden states and predictions of one text, on a page to click through.

`observe_text` runs a model on a text and packs all that the page shows; `render` makes the page.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.view.observation import Observation as Observation
    from clearhead.view.observation import observe_text as observe_text
    from clearhead.view.observation import render as render


__getattr__, __all__ = lazily(__name__)
