"""What comes from outside cannot command the reader's terminal."""

import io
import json
import re
from pathlib import Path

import pytest

from clearhead import terminal

from .conftest import call

RESULTS = Path(__file__).parents[2] / "results"
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b1mb\r\u202e[/red]"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\x9b1mb\r\u202e[/red]"
COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_what_commands_a_terminal_is_escaped():
    assert terminal.printable(HOSTILE) == SHOWN
    assert terminal.printable("no\udc80name") == r"no\udc80name"
    text = "tab\tline\nnaïve 日本語　नमस्ते 👩‍🔬 می‌خواهم\u00a0!"
    assert terminal.printable(text) == text


def test_text_that_is_the_result_reaches_a_pipe_as_it_is(monkeypatch):
    for out, written in ((io.StringIO(), HOSTILE), (Screen(), SHOWN)):
        monkeypatch.setattr("sys.stdout", out)
        terminal.write(HOSTILE)
        assert out.getvalue() == f"{written}\n"


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("optimizers.jsonl", "transformer · adamw"),
        ("long-context.jsonl", "transformer"),
        ("signal.jsonl", "transformer at the start"),
        ("quantization.jsonl", "transformer+adamw-seed0"),
    ],
)
def test_names_in_records_are_shown_in_tables(name, run, tmp_path, capsys):
    escaped = json.dumps(HOSTILE)[1:-1]
    records = (RESULTS / name).read_text("utf-8").replace(f'"{run}', f'"{escaped}')
    (tmp_path / "records.jsonl").write_text(records.replace('"label": "', f'"label": "{escaped}'))
    page = tmp_path / "page.html"
    assert call("report", str(tmp_path / "records.jsonl"), "--output", str(page)) == 0
    out = capsys.readouterr().out
    assert not COMMANDS.search(out)
    assert r"a\x1b]0;owned" in "".join(re.findall(r"[^\s│┃]+", out))


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["plan", HOSTILE],
        ["plan", f"--{HOSTILE}"],
        ["plan", "--set", HOSTILE],
        ["report", f"{HOSTILE}.jsonl"],
        ["generate", HOSTILE],
        ["eval", f"/{HOSTILE}/{HOSTILE}"],
        ["train", "--data.data", f"{HOSTILE}.txt"],
        ["train", "--train.tokens", HOSTILE],
    ],
)
def test_what_a_request_names_is_shown_in_its_refusal(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 2
    told = capsys.readouterr()
    assert told.err
    assert not COMMANDS.search(told.out + told.err)


def test_every_way_of_printing_by_rich_is_safe():
    from rich.markup import escape
    from rich.progress import Progress, TextColumn
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = terminal.console(file=out, width=200)
    table = Table("column", title=escape(HOSTILE))
    table.add_row(escape(HOSTILE))
    table.add_row(Text(HOSTILE))
    console.print(table)
    console.print(escape(HOSTILE))
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(HOSTILE)
    assert not COMMANDS.search(out.getvalue())
    assert out.getvalue().count(r"a\x1b]0;owned") == 5
