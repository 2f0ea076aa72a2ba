"""Show attention maps, hidden states and predictions of one text, on a page to click through that
needs no network.

examples:
  clearhead view ./SmolLM2-135M --text "The keys to the cabinet are on the table."
  clearhead view runs/a/final runs/b/final --text essay.txt --output page.html
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.errors import NOT_FINITE, ClearheadError
from clearhead.lab.sweep_configs import short_names
from clearhead.metavars import Model, OpensModels, Passage
from clearhead.ranges import Length
from clearhead.terminal import say

TEXT = (
    "In the winter of 1903 two brothers from Ohio carried a machine of spruce and muslin to a "
    "windy beach. On the seventeenth of December it flew: twelve seconds, forty metres, and then "
    "the sand again. When the brothers sent a telegram home to Ohio, the operator got the number "
    "of seconds wrong, and the brothers from Ohio went home for Christmas."
)


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """A page to click through."""

    models: Positional[tuple[Model, ...]]
    """One or two language models or encoders: a checkpoint's folder (RUN/final) or a hub name."""
    text: Passage = TEXT
    """Text to read: in words, or the first of a file, a folder or a source of --data.data."""
    output: Path = Path("runs/view.html")
    """The page."""
    tokens: Length = 256
    """Tokens read at most, the first of the text. The page grows with their square."""


def run(command: Command) -> int:
    if len(command.models) > 2:
        raise ClearheadError(f"give one model or two side by side; found {len(command.models)}")
    names = short_names(command.models)
    from clearhead.data.sources import passages
    from clearhead.lab.runs import load_model
    from clearhead.records.files import write_text
    from clearhead.view import observe_text, render

    text = next(passages(command.text, say))
    observations = []
    for source, name in zip(command.models, names, strict=True):
        model = load_model(source, ("causal", "masked", "bare"), command.trust_remote_code)
        observations.append(observe_text(*model, text, name=name, longest=command.tokens))
        if lost := observations[-1].lost:
            say(f"clearhead: {name} is {NOT_FINITE} {lost}")
    write_text(command.output, render(observations, title=" and ".join(names)))
    say(f"wrote {command.output}")
    return int(any(one.lost for one in observations))
