"""clearhead reproduce: the papers' claims and the experiments that decide them, at a scale."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.eval.options import HallucinationOptions
from clearhead.experiments.configs import Base, FinetuneJob
from clearhead.experiments.sweep_configs import EvaluateSettings, SweepConfig
from clearhead.metavars import Experiment, File, Pattern, Source
from clearhead.ranges import Count, Natural
from clearhead.terminal import say, show, write
from clearhead.train.config import Tracker

if TYPE_CHECKING:
    from clearhead.reproduce import Experiment as Study
    from clearhead.reproduce.trials import Table, Trial


@dataclass(frozen=True, kw_only=True)
class Command:
    """Claims or experiments, and their scale."""

    names: Positional[tuple[Experiment, ...]] = ()
    """Claims (diff/table2), all claims of a family (diff), experiments (blocks), or all; --list
    prints them."""
    list: bool = False
    """Print every claim with the experiment that decides it, and every experiment with its cost at
    the scale."""
    judge: tuple[File, ...] = ()
    """Records to judge the claims by; nothing is run. --output names the page, or a text where it
    ends in .md."""
    compose: tuple[File, ...] = ()
    """Records of together to choose repairs from, by the criteria of docs/findings.md; nothing is
    run."""
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
    seeds: tuple[Natural, ...] = ()
    """Seeds, in place of the experiment's own."""
    tokens: Count | None = None
    """Tokens of every training, in place of the experiment's own."""
    only: tuple[Pattern, ...] = ()
    """Arms to run, by name or pattern, such as "sas*"; where none is given all that are asked
    for."""
    questions: tuple[Pattern, ...] = ()
    """Questions to ask each model, by name or pattern, such as banking77; where none is given all
    of the experiment's. They leave out what a machine without network cannot ask."""
    base: Base = None
    """The trained model to start from, a folder or a hub name, in place of the experiment's own."""
    data: tuple[Source, ...] = ()
    """Sources of the training text, in place of the experiment's own."""
    test_data: tuple[Source, ...] = ()
    """Sources of the evaluations' text, read whole, in place of the experiment's own (of that from
    the hub, where it has some); of abilities the documents to summarise."""
    track: tuple[Tracker, ...] = ()
    """Trackers to log every training to, beside metrics.jsonl; each needs its extra."""
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
    if command.list:
        _list(command.scale)
        return 0
    if command.judge:
        return _judge(command)
    if command.compose:
        return _compose(command)
    chosen = _chosen(command)
    if command.dry_run:
        for _, trials, output in chosen:
            _print(trials, output)
        return 0
    return _run(command, chosen)


def _run(command: Command, chosen: "Sequence[tuple[str, Sequence[Trial], Path]]") -> int:
    """Run the experiments, and write a page of each and the book."""
    from clearhead.cli.publishing import publish
    from clearhead.experiments import forks
    from clearhead.progress import Line
    from clearhead.reproduce import stages
    from clearhead.train import make_trackers

    make_trackers(command.track)  # refuses one that is not installed
    stages.check_bases(trial for _, trials, _ in chosen for trial in trials)
    failed, sources = 0, {}
    start = forks.starting(command.jobs)
    for name, trials, output in chosen:
        with Line(unit="job") as work:
            records, wrong = stages.reproduce(
                trials, output, jobs=command.jobs, start=start, say=say, work=work
            )
        failed += wrong
        sources[name] = records
        title = f"clearhead reproduce {name}, {command.scale}"
        publish([records], output / "report.html", title=title)
    _publish_book(sources, (command.output or Path("runs")) / "claims.html")
    if failed:
        say(f"{failed} jobs failed: the same command tries them again")
    return 1 if failed else 0


def _list(scale: str) -> None:
    from clearhead.reproduce import EXPERIMENTS
    from clearhead.reproduce.claims import claims
    from clearhead.reproduce.cost import cost

    priced, trials = {}, {}
    for one in EXPERIMENTS.values():
        priced[one.name] = next(at for at in (scale, "tiny") if at in one.scales)
        trials[one.name] = list(one.trials(priced[one.name]))

    def bill(study: str, patterns: Iterable[str] = ("*",)) -> str:
        at = priced[study]
        chosen = [
            one for one in trials[study] if any(fnmatchcase(one.name, each) for each in patterns)
        ]
        return f"at {at} {cost(chosen).in_words(at)}"

    for claim in claims():
        names = ", ".join((claim.name, *claim.also))
        write(f"{names}: {claim.says} [{claim.study}, {bill(claim.study, claim.arms)}]")
    for one in EXPERIMENTS.values():
        write(f"{one.name}: {one.question} {one.paper}; {', '.join(one.scales)}; {bill(one.name)}")


def _compose(command: Command) -> int:
    from clearhead.report import load
    from clearhead.reproduce.composition import choose_repairs, judge_composition

    records = load([Path(one) for one in command.compose])
    for choice in [*choose_repairs(records), judge_composition(records)]:
        if choice is not None:
            write(choice.in_words())
    return 0


def _judge(command: Command) -> int:
    if command.names or command.dry_run:
        raise ClearheadError("judge reads records of all claims: give it --output alone")
    output = command.output or Path("claims.html")
    _publish_book({Path(one).name: Path(one) for one in command.judge}, output)
    return 0


def _publish_book(sources: dict[str, Path], output: Path) -> None:
    from clearhead.records.files import write_text
    from clearhead.report import load, write_page
    from clearhead.reproduce import book

    records = {name: load([path]) for name, path in sources.items()}
    if output.suffix == ".md":
        write_text(output, "\n".join(book.markdown(records)) + "\n")
    else:
        page = book.page(records)
        write_page(page, output)
        write(page.verdict[0])
    show(f"claims: {output}")


def _chosen(command: Command) -> "list[tuple[str, Sequence[Trial], Path]]":
    """The experiments asked for: name, trials and folder."""
    from clearhead.reproduce.claims import ALL, choose_studies

    studies = choose_studies(command.names, command.scale)
    found: list[tuple[str, Sequence[Trial], Path]] = []
    known: dict[str, dict[str, None]] = {"arms": {}, "questions": {}}
    for study, arms in studies:
        output = command.output or Path("runs") / f"{study.name}-{command.scale}"
        if command.output is not None and len(studies) > 1:
            output = command.output / study.name
        own = list(study.trials(command.scale))
        known["questions"] |= dict.fromkeys(name for one in own for name in one.table.questions)
        trials = [
            _based(replace(one, output=output, table=_changed(one.table, command, study)), command)
            for one in own
        ]
        known["arms"] |= dict.fromkeys(one.name for one in trials)
        patterns = command.only or arms or (ALL,)
        chosen = [one for one in trials if any(fnmatchcase(one.name, p) for p in patterns)]
        if chosen:
            found.append((study.name, chosen, output))
    for option, patterns, kind in (
        ("only", command.only, "arms"),
        ("questions", command.questions, "questions"),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in known[kind]):
                there = ", ".join(known[kind]) or "none"
                raise ClearheadError(f"{option} names {pattern!r}: {kind} are {there}")
    return found


def _based(trial: "Trial", command: Command) -> "Trial":
    """The trial from the command's model, where there is one."""
    if command.base is None:
        return trial
    if trial.config.base is None:
        raise ClearheadError(f"--from has no effect on {trial.name}, which begins anew")
    config = replace(trial.config, base=command.base)
    return replace(trial, base=None, table=replace(trial.table, config=config))


def _changed(table: "Table", command: Command, study: "Study") -> "Table":
    """The table with the seeds and texts of the command in place of its own."""
    config = replace(table.config, track=command.track)
    questions: dict[str, Any] = {
        name: replace(one, track=command.track) if isinstance(one, FinetuneJob) else one
        for name, one in table.questions.items()
        if any(fnmatchcase(name, p) for p in command.questions or ("*",))
    }
    if command.seeds:
        config = replace(config, seeds=command.seeds)
    if command.tokens is not None:
        config = replace(config, train=replace(config.train, tokens=command.tokens))
        table = replace(table, sweep_tokens=min(table.sweep_tokens, command.tokens))
    if command.data:
        config = replace(config, data=replace(config.data, data=command.data))
    if command.test_data:
        asked = {n: q for n, q in questions.items() if isinstance(q, SweepConfig)}
        if not asked:
            raise ClearheadError(f"test_data has no effect on {study.name}: leave it out")
        hub = {
            name: question
            for name, question in asked.items()
            if any(one.startswith("hf:") for one in (*question.data.data, *_documents(question)))
        }
        for name, question in (hub or asked).items():
            questions[name] = _reading(question, command.test_data)
    return replace(table, config=config, questions=questions)


def _documents(question: Any) -> tuple[str, ...]:
    """The sources of the documents that a question has summarised."""
    return getattr(question, "hallucination", HallucinationOptions()).files


def _reading(question: Any, sources: tuple[str, ...]) -> Any:
    """The question on other texts: on other documents where it has some, or else on other text."""
    from clearhead.reproduce.trials import WHOLE

    if _documents(question):
        documents = replace(question.hallucination, files=sources)
        return replace(question, hallucination=documents)
    text = replace(question.data, data=sources)
    if isinstance(question, EvaluateSettings):
        return replace(question, data=text, split="all")
    return replace(question, data=replace(text, validation=WHOLE))


def _print(trials: "Sequence[Trial]", output: Path) -> None:
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
    if later := [one.key for one in trials if one.rates and one.key not in rates]:
        write(f"# not known yet, for want of a rate: {', '.join(later)}")
