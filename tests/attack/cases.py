"""Generated cases: a seed and a number make each, and a failure says how to make it again.

CLEARHEAD_ATTACK_CASES is how many in all, CLEARHEAD_ATTACK_SEED another series of them, and
CLEARHEAD_ATTACK_ONLY the numbers of a few.
"""

import os
import random
import traceback
from collections.abc import Callable

SEED = os.environ.get("CLEARHEAD_ATTACK_SEED", "0")
CASES = int(os.environ.get("CLEARHEAD_ATTACK_CASES", "200"))
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

Attack = Callable[[random.Random], None]


def withstands(kind: str, attack: Attack) -> None:
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
