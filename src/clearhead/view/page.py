"""The viewer's page: one HTML file that opens offline and escapes all text."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from clearhead.view.observation import Observation

# Scripts and styles run only by their hash, so that no text of a model or a user can become one.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; "
    "base-uri 'none'; form-action 'none'"
)
_SCRIPTS = ("unpack.js", "colours.js", "heads.js", "maps.js", "text.js", "layers.js", "page.js")


def render(
    observations: Sequence[Observation], *, title: str, text: str, live: bool = False
) -> str:
    """The page as HTML text.

    Args:
        observations: of one model, or of two side by side.
        text: that they read, for the box of a live page.
        live: the page has a box to type in, and asks the server that it came from.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    style, script = _part("page.css"), "".join(map(_part, _SCRIPTS))
    policy = _POLICY.format(
        script=_hash(script), style=_hash(style), connect="'self'" if live else "'none'"
    )
    return environment.from_string(_part("page.html")).render(
        title=title,
        text=text,
        live=live,
        policy=policy,
        style=style,
        script=script,
        **payload(observations),
    )


def payload(observations: Sequence[Observation]) -> dict[str, Any]:
    """The answer of a live page's server: the models and packed maps, for JSON."""
    return {
        "models": [found.model for found in observations],
        "chunks": [found.chunks for found in observations],
    }


def _part(name: str) -> str:
    return resources.files("clearhead.view").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
