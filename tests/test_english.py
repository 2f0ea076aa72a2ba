"""The check of English that pre-commit runs: the tree passes it, and riddles do not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _check(*names: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, ".ci/english.py", *names]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_docstrings_and_pages_pass() -> None:
    paths = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    done = _check(*(str(path.relative_to(ROOT)) for path in paths))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("page.md", "A text, the first\npart of\nwhich is read.\n", '2: "of which"'),
        ("module.py", '"""What a module does."""\n', "1: opens with What"),
        ("module.py", 'A = 1\n"""The key\n\n    it is nothing but."""\n', '4: "nothing but"'),
        ("module.py", '"""Add.\n\n    Args:\n        a, b: numbers.\n    """\n', "a, b: a line"),
        ("module.py", '"""A module."""\n# of which a comment may speak\n', ""),
    ],
)
def test_a_riddle_is_refused(name: str, text: str, refused: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    done = _check(str(path))
    assert done.returncode == bool(refused)
    assert refused in done.stdout
