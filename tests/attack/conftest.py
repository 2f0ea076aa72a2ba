"""Generated attacks: what is attacked, the command line in forks of one process, and the cases.

A seed and a number make each case, and a failure says how to make it again. CLEARHEAD_ATTACK_CASES
is how many in all, CLEARHEAD_ATTACK_SEED another series of them, and CLEARHEAD_ATTACK_ONLY the
numbers of a few.
"""

import os
import random
import shlex
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SEED = os.environ.get("CLEARHEAD_ATTACK_SEED", "0")
CASES = int(os.environ.get("CLEARHEAD_ATTACK_CASES", "100"))
ONLY = [int(word) for word in os.environ.get("CLEARHEAD_ATTACK_ONLY", "").split(",") if word]
# Of all cases, by what one takes: from hundredths of a second to several seconds.
SHARES = {"configurations": 0.5, "commands": 0.36, "files": 0.11, "kills": 0.025, "pages": 0.005}
ESC = "\x1b]0;hacked\x07\x1b[2J"
SCRIPT = "<script>document.documentElement.dataset.hacked = 1</script>"
TEXTS = (
    "",
    " ",
    "-",
    "é漢\U0001f600",
    "a\nb",
    ESC,
    f"</script>{SCRIPT}",
    "<img src=x onerror='document.documentElement.dataset.hacked = 1'>",
    "\"' onmouseover=document.documentElement.dataset.hacked=1 autofocus onfocus=alert(1) x='",
    "[bold]x[/nothing]",
    "../../x",
    "%s {0} \\",
    "x" * 300,
    "nan",
    "\u202eright to left",
)

SHAPE = ("hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2")
WORDS = ("attention", "noise", "sink", "query", "key", "value", "head", "token", "layer", "norm")


def withstands(kind: str, attack: Callable[[random.Random], None]) -> None:
    """Make every case of a kind; fail with all that went wrong, each with its reproduction."""
    failures = []
    for number in ONLY or range(max(1, round(CASES * SHARES[kind]))):
        try:
            attack(random.Random(f"{SEED} {kind} {number}"))
        except Exception as error:
            told = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            again = f"CLEARHEAD_ATTACK_SEED={SEED} CLEARHEAD_ATTACK_ONLY={number}"
            failures.append(f"{again} python -m pytest tests/attack -k {kind}\n{told}")
    if failures:
        raise AssertionError(f"{len(failures)} cases\n\n" + "\n\n".join(failures[:50]))


@dataclass(frozen=True)
class Done:
    """A command that ended: its exit status (minus the number of a signal), and what it said."""

    words: list[str]
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Its command line, and what came of it."""
        return (
            f"clearhead {shlex.join(self.words)}\nexit {self.code}\n{self.out[-800:]}\n{self.err}"
        )

    def check(self) -> None:
        """Done, or refused in one line: nothing else."""
        assert self.code != -signal.SIGALRM, f"still running: {self.line}"
        assert self.code in (0, 2), f"exit status: {self.line}"
        assert "Traceback" not in self.err, f"traceback: {self.line}"
        # What generate writes is unchanged where no terminal is.
        shown = self.err if self.words[0] == "generate" else self.out + self.err
        assert "\x1b" not in shown, f"a raw escape: {self.line!r}"
        if self.code == 2:
            last = (self.err.strip().splitlines() or [""])[-1]
            assert last.startswith("clearhead: "), f"not one line: {self.line}"


Clearhead = Callable[..., Done]


@pytest.fixture(scope="session")
def clearhead(ready: Any) -> Clearhead:
    """clearhead(*words, cwd=, kill_at=): a command line, killed at that file operation in `cwd`."""

    def run(*words: str, cwd: Path, kill_at: int = 0) -> Done:
        done = ready.run("-m", "clearhead", *words, cwd=cwd, kill_at=kill_at, seconds=120)
        return Done([*words], done.returncode, done.stdout, done.stderr)

    return run


def data(*more: str) -> list[str]:
    """Options of the text."""
    return ["--data.data", "text", "--data.validation", "0.2", "--data.cache", "cache", *more]


def training(steps: int = 2, *more: str) -> list[str]:
    """Options of a training of so many steps."""
    return [
        *data("--data.vocabulary", "280", "--train.tokens", str(32 * steps)),
        *("--train.sequence-length", "16", "--train.batch-size", "2"),
        *("--train.precision", "fp32", *more),
    ]


def compared(*more: str) -> list[str]:
    """A comparison of two models."""
    return [
        *("compare", "transformer", "softmax1", "--set", *SHAPE, "--output", "compared"),
        *("--lengths", "1", "2", "--evaluation-tokens", "64", "--measure-every", "0.5"),
        *training(2, *more),
    ]


@pytest.fixture(scope="session")
def made(clearhead: Clearhead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a trained model in run/, a comparison, and records of other verbs."""
    folder = tmp_path_factory.mktemp("made")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(30):
        lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(12)]
        (folder / "text" / f"{number:02}.txt").write_text("\n".join(lines), "utf-8")
    few = ["--length", "16", *data()]
    for words in (
        ["train", "transformer", "--set", *SHAPE, "--output", "run", *training(4)],
        compared(),
        ["eval", "run", "--lengths", "16", "--tokens", "64", "--records", "eval.jsonl", *data()],
        ["diagnose", "run", "--output", "diagnosed", "--windows", "2", *few],
        [
            *("quantize", "run", "--scheme", "w8a8-coarse", "--tokens", "64"),
            *("--records", "quantized.jsonl", *few),
        ],
    ):
        done = clearhead(*words, cwd=folder)
        assert done.code == 0, done.line
    return folder
