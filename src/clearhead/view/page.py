"""The viewer's page: the pages' template with the viewer's own scripts."""

from collections.abc import Sequence
from importlib import resources

from clearhead.report.page import Notes, Page, Section
from clearhead.report.page import render as render_page
from clearhead.view.observation import Observation

SCRIPTS = ("unpack.js", "colours.js", "heads.js", "maps.js", "text.js", "layers.js", "page.js")
KEYS = (
    "Keys: H heads, T text, M map, C colours; arrows move within each. Attention weights are drawn "
    "in 24 levels (31 where they have signs) on a √ scale."
)


def render(observations: Sequence[Observation], *, title: str) -> str:
    """The page as HTML text.

    Args:
        observations: of one model, or of two side by side.
    """
    files = resources.files("clearhead.view")
    page = Page(
        title=title,
        kicker="clearhead view",
        sections=[Section(name="viewer", blocks=(Notes(texts=(KEYS,)),))],
        script="".join(files.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS),
        data={"models": [one.model for one in observations]},
        late=[one.chunks for one in observations],
    )
    return render_page(page)
