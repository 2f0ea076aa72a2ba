"""Hostile words in records, as a browser shows them: no script runs, nothing breaks the page."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests_chromium import browse

from .conftest import ESC, TEXTS, withstands

pytestmark = pytest.mark.browser
# Words of the format itself; all others are a user's.
FORMAT = {"kind", "metric", "task", "date", "device", "dtype", "scaling", "map", "objective"}


def _replaced(value: Any, word: Callable[[str], str]) -> Any:
    """A record with `word` of each word of a user's in it."""
    if isinstance(value, dict):
        return {key: one if key in FORMAT else _replaced(one, word) for key, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, word) for one in value]
    return word(value) if isinstance(value, str) else value


def test_pages_run_no_script_of_a_record(made, clearhead, chromium, tmp_path):
    def attack(draw: random.Random) -> None:
        name = draw.choice(
            ("compared/records.jsonl", "eval.jsonl", "diagnosed/diagnosis.jsonl", "quantized.jsonl")
        )
        lines = [json.loads(line) for line in (made / name).read_text("utf-8").splitlines()]
        found, share = set[str](), draw.choice((0.05, 0.5))
        _replaced(lines, lambda word: found.add(word) or word)
        words = {word: draw.choice(TEXTS) for word in sorted(found) if draw.random() < share}
        records = tmp_path / f"{draw.choice((ESC[2:6], '<b onclick=alert(1)>', 'plain'))}.jsonl"
        text = "".join(
            json.dumps(_replaced(line, lambda word: words.get(word, word))) + "\n" for line in lines
        )
        records.write_text(text, "utf-8")
        title = draw.choice(TEXTS)
        done = clearhead(
            *("report", records.name, "--output", "page.html", f"--title={title}"), cwd=tmp_path
        )
        done.check()
        if done.code:
            return
        page = (tmp_path / "page.html").as_uri()
        dom = browse(chromium, tmp_path, page, "--dump-dom")
        assert "data-hacked" not in dom.split(">", 2)[1], f"a script ran: {name} {words} {title!r}"
        assert "data-drawn" in dom, f"never drawn: {name} {words} {title!r}"
        assert "data-errors" not in dom, f"an error on the page: {name} {words} {title!r}"

    withstands("pages", attack)
