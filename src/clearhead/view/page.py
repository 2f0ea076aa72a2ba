"""The viewer's page: one HTML file that opens offline and escapes all text."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from clearhead.view.observation import Observation

# Scripts and styles run only by their hash, so that no text of a model or a user can become one.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; "
    "form-action 'none'"
)
_SCRIPTS = ("unpack.js", "colours.js", "heads.js", "maps.js", "text.js", "layers.js", "page.js")


def render(observations: Sequence[Observation], *, title: str) -> str:
    """The page as HTML text.

    Args:
        observations: of one model, or of two side by side.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    style, script = _part("page.css"), "".join(map(_part, _SCRIPTS))
    return environment.from_string(_part("page.html")).render(
        title=title,
        policy=_POLICY.format(script=_hash(script), style=_hash(style)),
        style=style,
        script=script,
        models=[one.model for one in observations],
        chunks=[one.chunks for one in observations],
    )


def _part(name: str) -> str:
    return resources.files("clearhead.view").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
