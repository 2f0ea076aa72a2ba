"""The pages for users: what they link to is there, and what they tell a reader to run, runs."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from clearhead.cli import options

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "results/README.md"])
# Words of a pattern for the reader to fill in, not of a command; or of a package of theirs.
PATTERN = ("[", "…", "--import quieter")


def _programs(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)


HOW_TO = _programs("docs/howto.md")


def _blocks(text):
    """The lines of code blocks, fenced or indented."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()


def _commands(page):
    """The words of every whole `clearhead VERB …` in the code blocks of a page."""
    text = re.sub(r"\\\n", " ", page.read_text("utf-8"))
    for line in _blocks(text):
        launched = re.sub(r"^(srun )?torchrun .* -m clearhead ", "clearhead ", line)
        if launched.startswith("clearhead ") and not any(mark in line for mark in PATTERN):
            yield shlex.split(launched, comments=True)[1:]


COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in _commands(page)
    if words != ["--version"]
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_pages_is_understood(words):
    verb, *rest = words
    module = importlib.import_module(f"clearhead.cli.{verb}")
    options.parse(module, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_first_program_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (program,) = _programs("README.md")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    assert (tmp_path / "my-model/model.safetensors").exists()
    assert capsys.readouterr().out.startswith("tensor([[")


def test_the_pages_have_commands_and_programs():
    assert len(COMMANDS) > 10
    assert len(HOW_TO) == 5


@pytest.mark.parametrize("number", range(len(HOW_TO)))
def test_a_program_of_the_how_to_runs_as_it_stands(number, tmp_path, warm):
    program = tmp_path / "program.py"  # a process: what it registers stays its own
    program.write_text(HOW_TO[number])
    done = warm.run(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_command_knows_the_mechanism_of_the_how_to(tmp_path, warm):
    (program,) = (one for one in HOW_TO if "register_preset" in one)
    (tmp_path / "quieter.py").write_text(program)
    words = ["plan", "quieter", "--set", "hidden_size=48", "--import", "quieter"]
    done = warm.run("-m", "clearhead", *words, cwd=tmp_path)
    assert done.stdout.startswith("quieter, hidden_size=48"), done.stderr
