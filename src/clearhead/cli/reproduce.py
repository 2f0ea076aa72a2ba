"""Decide a paper's claim by its experiment: sweep the learning rates of each arm, train every seed
at the best, evaluate, and print the published number beside ours.

examples:
  clearhead reproduce --list
  clearhead reproduce blocks --jobs 2 --only transformer "sas*"
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.lab.configs import ReproduceConfig as Command
from clearhead.terminal import say, show, write


def run(command: Command) -> int:
    if command.list:
        _list(command.scale)
        return 0
    if command.judge:
        judged = {Path(one).name: Path(one) for one in command.judge}
        return _publish_book(judged, command.output or Path("claims.md"))
    from clearhead.papers.requests import chosen

    changing = ("only", "questions", "seeds", "tokens", "base", "data", "test_data")
    changes = {name: getattr(command, name) for name in changing}
    studies = chosen(command.names, command.scale, command.output, **changes)
    from clearhead.cli.publishing import publish
    from clearhead.models.conversion import require_convertible
    from clearhead.papers import stages
    from clearhead.progress import Line

    every = [one for arms in studies.values() for one in arms]
    for one in every:
        one.check()
    for name in dict.fromkeys(one.base for one in every if one.base):
        require_convertible(name)
    failed, sources = 0, {}
    for name, arms in studies.items():
        output = arms[0].output
        with Line(unit="job") as work:
            records, wrong = stages.reproduce(arms, output, jobs=command.jobs, work=work)
        failed += wrong
        sources[name] = records
        title = f"clearhead reproduce {name}, {command.scale}"
        publish([records], output / "report.html", title=title)
    _publish_book(sources, (command.output or Path("runs")) / "claims.md")
    if failed:
        say(f"{failed} jobs failed: the same command tries them again")
    return 1 if failed else 0


def _list(scale: str) -> None:
    from clearhead.papers.claims import CLAIMS
    from clearhead.papers.requests import EXPERIMENTS, arms_for, arms_of, cost

    def bill(arms: Sequence[Any]) -> str:
        return f"at {scale} {cost(arms, scale)}" if arms else f"not at {scale}"

    for one in CLAIMS:
        names, costs = ", ".join((one.name, *one.also)), bill(arms_for(one, scale))
        write(f"{names}: {one.says} [{one.study}, {costs}]")
    for each in EXPERIMENTS.values():
        where = f"{each.paper}; {', '.join(each.scales)}; {bill(arms_of(each.name, scale))}"
        write(f"{each.name}: {each.about} {where}")


def _publish_book(sources: dict[str, Path], output: Path) -> int:
    """Write the claims as the records decide them, and print their summary."""
    from clearhead.papers import book
    from clearhead.records.files import write_text
    from clearhead.report import load

    text = "\n".join(book.markdown({name: load([path]) for name, path in sources.items()}))
    write_text(output, f"{text}\n")
    write(text.partition("\n\n## The claims")[0])
    show(f"claims: {output}")
    return 0
