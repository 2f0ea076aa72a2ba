"""Decide a paper's claim by its experiment: sweep the learning rates of each arm, train every seed
at the best, evaluate, and print the published number beside ours.

examples:
  clearhead reproduce --list
  clearhead reproduce blocks --jobs 2 --only transformer "sas*"
"""

from pathlib import Path

from clearhead.lab.configs import ReproduceConfig as Command
from clearhead.records.runs import Records
from clearhead.terminal import say, show, write


def run(command: Command) -> int:
    from clearhead.papers import requests

    if command.list:
        write("\n".join(requests.listed(command.scale)))
        return 0
    from clearhead.report import load, page_of

    if command.judge:
        judged = {path.name: load(path) for path in map(Path, command.judge)}
        return _publish_book(judged, command.output or Path("claims.md"))
    changing = ("only", "questions", "seeds", "tokens", "base", "data", "test_data")
    changes = {name: getattr(command, name) for name in changing}
    studies = requests.chosen(command.names, command.scale, command.output, **changes)
    from clearhead.cli.publishing import publish
    from clearhead.models.conversion import require_convertible
    from clearhead.papers import stages
    from clearhead.progress import Line

    every = [one for arms in studies.values() for one in arms]
    for one in every:
        one.check()
    for name in dict.fromkeys(one.base for one in every if one.base):
        require_convertible(name)
    failed, sources = 0, dict[str, Records]()
    for name, arms in studies.items():
        output = arms[0].output
        with Line(unit="job") as work:
            path, wrong = stages.reproduce(arms, output, jobs=command.jobs, work=work)
        failed += wrong
        sources[name], title = load(path), f"clearhead reproduce {name}, {command.scale}"
        publish(page_of(sources[name], title), output / "report.html")
    _publish_book(sources, (command.output or Path("runs")) / "claims.md")
    if failed:
        say(f"{failed} jobs failed: the same command tries them again")
    return int(failed > 0)


def _publish_book(sources: dict[str, Records], output: Path) -> int:
    from clearhead.papers import book
    from clearhead.records.files import write_text

    text = "\n".join(book.markdown(sources))
    write_text(output, f"{text}\n")
    write(text.partition("\n\n## The claims")[0])
    show(f"claims: {output}")
    return 0
