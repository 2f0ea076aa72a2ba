"""Every option of every verb, frozen by name: one that goes is named in CHANGELOG.md.

Where other options are meant, `python tests/cli/test_frozen_options.py` writes
frozen_options.json again.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from clearhead.cli import VERBS, main

FROZEN = Path(__file__).with_name("frozen_options.json")


def options_of(verb: str) -> list[str]:
    """The names that a verb's help lists, without the examples above the list."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    rows = re.findall(r"^[│ ] (-[^\s,]+(?:, -[^\s,]+)*)", told.getvalue(), re.MULTILINE)
    return sorted({name for row in rows for name in row.split(", ")})


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_of_a_verb_are_those_that_are_written_down(verb):
    frozen = json.loads(FROZEN.read_text())
    assert [*frozen] == [*VERBS]
    assert options_of(verb) == frozen[verb]


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({verb: options_of(verb) for verb in VERBS}, indent=1) + "\n")
