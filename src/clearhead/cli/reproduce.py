"""clearhead reproduce: the papers' claims and the experiments that decide them, at a scale."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.metavars import Experiment, File
from clearhead.ranges import Count
from clearhead.reproduce.options import Changes
from clearhead.terminal import say, show, write

if TYPE_CHECKING:
    from clearhead.reproduce.study import Study


BESIDE = {"list": ("scale",), "judge": ("output",)}
"""Modes that run nothing → the options that each takes."""


@dataclass(frozen=True, kw_only=True)
class Command(Changes):
    """Claims or experiments, and their scale."""

    names: Positional[tuple[Experiment, ...]] = ()
    """Claims (diff/table2), all claims of a family (diff), experiments (blocks), or all; --list
    prints them."""
    list: bool = False
    """Print every claim with the experiment that decides it, and every experiment with its cost at
    the scale."""
    judge: tuple[File, ...] = ()
    """Records to judge the claims by; nothing is run. --output names the book (Markdown)."""
    scale: Literal["smoke", "tiny", "small", "paper"] = "tiny"
    """smoke tries the machinery in a few steps, tiny runs on two CPU cores, small takes minutes a
    model on one GPU, paper is the published recipe, with a GPU for each of --jobs. Commands that
    spread one model over several GPUs: clearhead plan --recipes."""
    output: Path | None = None
    """Folder for everything that is made; runs/EXPERIMENT-SCALE where not given. The same command
    goes on where it stopped, and claims of one experiment share its runs."""
    jobs: Count = 1
    """Jobs that run at once, each with its share of the CPU's threads and on one GPU of those there
    are, the least used."""
    dry_run: bool = False
    """Print the commands that are known so far, and run nothing."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="reproduce",
        description="Decide a paper's claim by its experiment: sweep the rates of each arm, train "
        "every seed at the best, evaluate, and set the published number beside ours.",
        examples=("--list", 'blocks --jobs 2 --only transformer "sas*"'),
    )
    _refuse_idle(command)
    if command.list:
        _list(command.scale)
        return 0
    if command.judge:
        judged = {Path(one).name: Path(one) for one in command.judge}
        _publish_book(judged, command.output or Path("claims.md"))
        return 0
    chosen = _chosen(command)
    if command.dry_run:
        for trials in chosen.values():
            _print(trials, trials[0].output)
        return 0
    return _run(command, chosen)


def _refuse_idle(command: Command) -> None:
    """Refuse what would have no effect where nothing is run."""
    mode = next((one for one in BESIDE if getattr(command, one)), None)
    if mode is None:
        return
    idle = [
        " ".join(command.names)
        if one.name == "names"
        else f"--{'from' if one.name == 'base' else one.name.replace('_', '-')}"
        for one in fields(command)
        if one.name not in (mode, *BESIDE[mode]) and getattr(command, one.name) != one.default
    ]
    if idle:
        alone = " and ".join(f"--{one}" for one in BESIDE[mode])
        raise ClearheadError(
            f"{', '.join(idle)} would have no effect with --{mode}: "
            + (f"give it {alone} alone" if alone else "give it alone")
        )


def _run(command: Command, chosen: "Mapping[str, Sequence[Study]]") -> int:
    """Run the experiments, and write a page of each and the book of claims."""
    from clearhead.cli.publishing import publish
    from clearhead.progress import Line
    from clearhead.reproduce import stages

    stages.check_models(chain.from_iterable(chosen.values()))
    failed, sources = 0, {}
    for name, trials in chosen.items():
        output = trials[0].output
        with Line(unit="job") as work:
            records, wrong = stages.reproduce(trials, output, jobs=command.jobs, say=say, work=work)
        failed += wrong
        sources[name] = records
        title = f"clearhead reproduce {name}, {command.scale}"
        publish([records], output / "report.html", title=title)
    _publish_book(sources, (command.output or Path("runs")) / "claims.md")
    if failed:
        say(f"{failed} jobs failed: the same command tries them again")
    return 1 if failed else 0


def _list(scale: str) -> None:
    from clearhead.reproduce.claims import claims
    from clearhead.reproduce.cost import cost
    from clearhead.reproduce.experiments import EXPERIMENTS
    from clearhead.reproduce.requests import has_arms, trials

    def bill(study: str, at: str, patterns: Iterable[str] = ("*",)) -> str:
        chosen = [
            one
            for one in trials(study, at)
            if any(fnmatchcase(one.name, each) for each in patterns)
        ]
        return f"at {at} {cost(chosen).in_words(at)}"

    for claim in claims():
        names, at, none = ", ".join((claim.name, *claim.also)), scale, ""
        if not has_arms(claim, scale):
            at, none = "tiny", f"no arms at {scale}, "
        write(f"{names}: {claim.says} [{claim.study}, {none}{bill(claim.study, at, claim.arms)}]")
    for one in EXPERIMENTS.values():
        at = scale if scale in one.scales else "tiny"
        scales = ", ".join(one.scales)
        write(f"{one.name}: {one.question} {one.paper}; {scales}; {bill(one.name, at)}")


def _publish_book(sources: dict[str, Path], output: Path) -> None:
    from clearhead.records.files import write_text
    from clearhead.report import load
    from clearhead.reproduce import book

    text = "\n".join(book.markdown({name: load([path]) for name, path in sources.items()}))
    write_text(output, f"{text}\n")
    write(text.partition("\n\n## The claims")[0])
    show(f"claims: {output}")


def _chosen(command: Command) -> "dict[str, list[Study]]":
    """The arms of the experiments asked for, each with the experiment's folder."""
    from clearhead.reproduce.contrasts import ALL
    from clearhead.reproduce.requests import change, choose_studies, without_arms

    studies = choose_studies(command.names, command.scale)
    if absent := without_arms(command.names, command.scale):
        say(f"left out, without arms at {command.scale}: {', '.join(absent)}")
    chosen: dict[str, list[Study]] = {}
    arms, questions = dict[str, None](), dict[str, None]()
    for study, named in studies:
        output = command.output or Path("runs") / f"{study.name}-{command.scale}"
        if command.output is not None and len(studies) > 1:
            output = command.output / study.name
        own = [replace(one, output=output) for one in study.trials(command.scale)]
        arms |= dict.fromkeys(one.name for one in own)
        patterns = command.only or named or (ALL,)
        trials = [one for one in own if any(fnmatchcase(one.name, p) for p in patterns)]
        questions |= dict.fromkeys(name for one in trials for name in one.questions)
        if trials:
            chosen[study.name] = trials
    _check_patterns("only", command.only, "arms", arms)
    _check_patterns("questions", command.questions, "questions", questions)
    return change(chosen, command, say=say)


def _check_patterns(
    option: str, patterns: Iterable[str], kind: str, names: Collection[str]
) -> None:
    """Refuse a pattern that names nothing of what is asked for."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(names) or "none"
            raise ClearheadError(f"{option} names {pattern!r}: {kind} are {there}")


def _print(trials: "Sequence[Study]", output: Path) -> None:
    from clearhead.reproduce import stages

    stages.check_rates(trials, output)
    rates = stages.rates(trials, output)
    known = {
        "models to start from": stages.preparations(trials),
        "rates": stages.sweeps(trials, stages.settled(output)),
        "runs and evaluations": stages.runs(trials, rates),
    }
    for name, jobs in known.items():
        write("\n".join([f"# {name}", *map(str, jobs)]))
    if later := [one.key for one in trials if one.tries and one.key not in rates]:
        write(f"# not known yet, for want of a rate: {', '.join(later)}")
