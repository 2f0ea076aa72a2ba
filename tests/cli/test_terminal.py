"""What comes from outside cannot command the reader's terminal; a closed one stops a run."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import terminal

from .conftest import SMALL, call, changed, refusal

RESULTS = Path(__file__).parents[2] / "results"
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b1mb\r\u202e[/red]"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\x9b1mb\r\u202e[/red]"
COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_only_what_commands_a_terminal_is_escaped():
    assert terminal.printable(HOSTILE) == SHOWN
    assert terminal.printable("no\udc80name") == r"no\udc80name"
    text = "tab\tline\nnaïve 日本語　नमस्ते 👩‍🔬 می‌خواهم\u00a0!"
    assert terminal.printable(text) == text


@pytest.mark.parametrize(("screen", "written"), [(False, HOSTILE), (True, SHOWN)])
def test_text_that_is_the_result_reaches_a_pipe_as_it_is(screen, written, monkeypatch):
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    monkeypatch.setattr(out, "isatty", lambda: screen, raising=False)
    terminal.write(HOSTILE)
    assert out.getvalue() == f"{written}\n"


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("optimizers.jsonl", "transformer · adamw"),
        ("quantization.jsonl", "transformer+adamw-seed0"),
    ],
)
def test_names_in_records_are_shown_in_tables(name, run, tmp_path, capsys):
    escaped = json.dumps(HOSTILE)[1:-1]
    records = (RESULTS / name).read_text("utf-8").replace(f'"{run}', f'"{escaped}')
    (tmp_path / "records.jsonl").write_text(records.replace('"label": "', f'"label": "{escaped}'))
    page = tmp_path / "page.html"
    assert call("report", tmp_path / "records.jsonl", "--output", page) == 0
    out = capsys.readouterr().out
    assert not COMMANDS.search(out)
    assert r"a\x1b]0;owned" in "".join(re.findall(r"[^\s│┃]+", out))


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["plan", HOSTILE],
        ["plan", "--set", HOSTILE],
        ["eval", f"/{HOSTILE}/{HOSTILE}"],
        ["train", "--train.tokens", HOSTILE],
    ],
)
def test_what_a_request_names_is_shown_in_its_refusal(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 2
    told = capsys.readouterr()
    assert told.err
    assert not COMMANDS.search(told.out + told.err)


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("utf-8", "→ é 漢"), ("latin-1", r"\u2192 é \u6f22"), ("ascii", r"\u2192 \xe9 \u6f22")],
)
def test_an_encoding_without_a_character_gets_its_escape(encoding, written, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr("sys.stdout", out)
    terminal.open_streams()
    terminal.write("→ é 漢\udce9")
    terminal.flush()
    assert out.buffer.getvalue().decode(encoding) == written + "\\udce9\n"


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("clearhead plan --help >&-", 0, b""),
        ("clearhead --help >&- 2>&- <&-", 0, b""),
        ("clearhead nothing 2>&-", 2, b""),
        ("clearhead --help > /dev/full", 2, b"clearhead: No space left on device\n"),
        ("clearhead --help | true; exit ${PIPESTATUS[0]}", 0, b""),
        ("LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 clearhead train --help", 0, b""),
    ],
)
def test_a_stream_or_an_encoding_is_no_traceback(command, code, error, tmp_path):
    script = f'clearhead() {{ "{sys.executable}" -m clearhead "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr[: len(error) or None]) == (code, error)
    assert b"Traceback" not in done.stderr


def test_a_prompt_in_utf8_is_one_in_every_locale(llama, capsys):
    """Of a locale that has no such character the command line arrives as bytes that are escaped."""
    prompt = "é 漢".encode().decode("ascii", "surrogateescape")
    assert call("generate", llama, prompt, "--tokens", 1, "--temperature", 0) == 0
    assert capsys.readouterr().out.startswith("é 漢")


@pytest.mark.parametrize(
    "words", ["generate m", "view m --text", "convert m made --prefix", "compare", "eval m --label"]
)
def test_words_that_are_not_utf8_are_refused(words, capsys):
    assert "is not UTF-8" in refusal(capsys, *words.split(), "caf\udce9 the")


def test_a_file_whose_name_is_not_utf8_is_refused_in_a_line(tmp_path, llama, capsys):
    (tmp_path / "m\udce9").symlink_to(llama)
    assert "not valid UTF-8" in refusal(capsys, "generate", tmp_path / "m\udce9", "noise")


def test_ctrl_c_is_a_keyboard_interrupt(monkeypatch, capsys):
    monkeypatch.setattr("clearhead.cli._run", lambda words: os.kill(os.getpid(), signal.SIGINT))
    assert call("plan") == 130
    assert capsys.readouterr().err == "clearhead: interrupted\n"


# The leader of a session in that terminal; nohup may have started these tests.
IN_A_TERMINAL = """import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
for stream, name in enumerate(("stdin", "stdout", "stderr")):
    os.dup2(terminal, stream)
    setattr(sys, name, open(stream, "w" if stream else "r", closefd=False))
from clearhead.cli import main
main(sys.argv[2:])
"""


def test_a_closed_terminal_stops_the_run_as_a_signal_does(settings, warm, tmp_path, capsys):
    """What it prints then, in a terminal that is gone, must not end it before it has saved."""
    run = tmp_path / "run"
    words = ["train", "gated", "--set", *SMALL, *settings, "--train.log-every=1"]
    words = changed(words, "--train.tokens", "640000")
    terminal, theirs = pty.openpty()
    process = warm.start("-c", IN_A_TERMINAL, os.ttyname(theirs), *words, "--output", run)
    shown, metrics = b"", run / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert select.select([terminal], [], [], 60)[0], shown
        shown += os.read(terminal, 4096)
    os.close(theirs)
    os.close(terminal)
    assert process.wait().returncode == 128 + signal.SIGHUP, shown
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = json.loads(metrics.read_text("utf-8").splitlines()[-1])["step"]
    assert checkpoint.name.endswith(f"{step}")
    assert f"go on with it by --resume {run}" in refusal(capsys, *words, "--output", run)


def test_a_fault_is_one_line_and_its_traceback_is_at_hand(capsys, monkeypatch):
    monkeypatch.setattr("clearhead.cli.plan.run", lambda command: 1 / 0)
    assert call("plan") == 2
    line = "clearhead: ZeroDivisionError: division by zero: a fault, which CLEARHEAD_TRACEBACK=1"
    assert capsys.readouterr().err == f"{line} shows in full\n"
    monkeypatch.setenv("CLEARHEAD_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        call("plan")
