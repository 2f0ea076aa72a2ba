"""clearhead quantize: the cost of few bits, simulated; and models saved in few bits."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.consent import OpensModels
from clearhead.data.config import DataConfig
from clearhead.errors import ClearheadError, require
from clearhead.metavars import Model, SchemeName, Text
from clearhead.ranges import Count, Length
from clearhead.terminal import console, say, show

if TYPE_CHECKING:
    from clearhead.quantize import Scheme

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """Models, schemes and text."""

    models: Positional[tuple[Model, ...]]
    """Checkpoints' folders (RUN/final), or hub names."""
    scheme: tuple[SchemeName, ...] = ()
    """Schemes such as w8a8-coarse, w8a8-fine, w4-channel, w3-group64, logits6-row. All those of
    docs/quantize.md where none is given, or "all"."""
    deploy: (
        Literal["int8-weight-only", "int8-dynamic", "int8-dynamic-tensor", "int4-weight-only"]
        | None
    ) = None
    """Instead of simulating, save one model in this form (extra torchao) to --output."""
    output: Path | None = None
    """The folder of the saved model; it must not exist yet."""
    length: Length = 256
    """Tokens in a window of text."""
    tokens: int = 32_768
    """Validation tokens read under each scheme."""
    choices: Path | None = None
    """Questions to answer too (extra lm-eval), a .jsonl(.gz) file as for eval --tasks choices:
    HellaSwag, ARC, PIQA, WinoGrande, BoolQ or your own (question, choices, label)."""
    questions: Count = 200
    """Number of questions to ask: the first ones of the file."""
    records: Path | None = None
    """File to add the results to; the page then shows all that it holds."""
    page: Path | None = None
    """File for the page of perplexity against bits."""
    title: Text = ""
    """The page's title; the models' names unless given."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is each model's own."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="quantize",
        description="Simulate models in few bits, and measure perplexity and accuracy by scheme. "
        "Or, with --deploy, save a model in few bits and measure its size, speed and perplexity.",
        examples=(
            "./SmolLM2-135M --scheme w8a8-coarse w8a8-token w4-channel",
            "MODEL --deploy int8-weight-only --output runs/int8",
        ),
    )
    from clearhead.experiments.building import refuse_tokenizer
    from clearhead.records.lock import hold_file

    refuse_tokenizer(command.data)
    if command.deploy is not None or command.output is not None:
        return _deploy(command)
    with hold_file(command.records):
        return _simulate(command)


def _simulate(command: Command) -> int:
    from clearhead.experiments.quantization import distinct
    from clearhead.records import jsonl
    from clearhead.records.files import write_text
    from clearhead.records.loading import load
    from clearhead.records.loading import parse as parse_records
    from clearhead.report import page_of, to_console, write_page

    schemes = _checked(command)
    lines: list[dict[str, Any]] = []
    for path, name in zip(command.models, distinct(command.models), strict=True):
        found = _measure(command, path, name, schemes)
        if command.records is not None:
            before = jsonl.read(command.records) if command.records.exists() else []
            write_text(command.records, "".join(map(jsonl.encode, [*before, *found])))
        lines += found
        for part in to_console(page_of(parse_records(found))):
            console().print(part)
    if command.page is not None:
        shown = parse_records(lines) if command.records is None else load(command.records)
        write_page(page_of(shown, command.title), command.page)
        show(f"page: {command.page}")
    return 0


def _deploy(command: Command) -> int:
    from rich.markup import escape
    from rich.table import Table

    from clearhead.data import prepare
    from clearhead.experiments import deployment, quantization
    from clearhead.experiments.checkpoints import load_model
    from clearhead.models.inspection import within_memory
    from clearhead.models.loading import resolved
    from clearhead.quantize.deploy import deploy
    from clearhead.records import manifest
    from clearhead.records.files import write_json

    idle = _given(command, "scheme", "choices", "questions", "records", "page", "title")
    if command.deploy is None or command.output is None or len(command.models) != 1 or idle:
        raise ClearheadError(
            "a model to keep takes one model, --deploy and --output"
            + (f"; {', '.join(idle)} would have no effect" if idle else "")
        )
    (path,) = command.models
    with within_memory("the model is held twice, whole and in few bits: free memory for both"):
        peer, tokenizer = load_model(path, trust_remote_code=command.trust_remote_code)
        made = deploy(
            peer,
            tokenizer,
            resolved(path),
            command.deploy,
            command.output,
            trust_remote_code=command.trust_remote_code,
        )
    corpus = prepare(command.data, tokenizer=tokenizer, progress=say)
    read = quantization.texts(corpus, length=command.length, tokens=command.tokens, schemes=())
    found = deployment.figures(made, command.output, read.windows, progress=say)
    write_json(command.output / deployment.FIGURES, {"form": command.deploy, "of": path, **found})
    manifest.seal(command.output)
    title = escape(f"{path}, {command.deploy}")
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "bfloat16", command.deploy, "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, key, form in (
        ("bytes on disk", "bytes", ",d"),
        ("tokens a second", "tokens_per_second", ",.1f"),
        ("perplexity", "perplexity", ",.4f"),
    ):
        ours, full = found[key], found[f"bfloat16_{key}"]
        table.add_row(name, format(full, form), format(ours, form), f"{ours / full:.3f}")
    console().print(table)
    if found["other_linear_layers"]:
        show(f"still in bfloat16, unknown to torchao: {', '.join(found['other_linear_layers'])}")
    if (remark := deployment.not_smaller(command.deploy, found)) is not None:
        show(remark)
    show(f"saved: {command.output}; loaded and run by a new process")
    return 0


def _given(command: Command, *names: str) -> list[str]:
    """The options among `names` that have another value than when they are left out."""
    return [f"--{name}" for name in names if getattr(command, name) != getattr(Command, name)]


def _checked(command: Command) -> list["Scheme"]:
    """The schemes asked for, after everything that can be refused before a model is loaded."""
    from clearhead.quantize import every, scheme
    from clearhead.records.loading import load
    from clearhead.records.runs import QUANTIZATION
    from clearhead.report.quantization import check

    if len(set(command.models)) < len(command.models):
        raise ClearheadError("a model is given twice: give each once")
    if command.tokens < command.length:
        raise ClearheadError(
            f"tokens is {command.tokens}: give one length, {command.length}, or more"
        )
    idle = [] if command.choices else _given(command, "questions")
    idle += [] if command.page else _given(command, "title")
    if idle:
        raise ClearheadError(f"{', '.join(idle)} would have no effect without --choices or --page")
    if command.choices is not None:
        require("lm_eval", "lm-eval")
    if command.records is not None and command.records.exists():
        known = check(load(command.records))  # refused before the work
        if any(run.study != QUANTIZATION for run in known.runs):
            raise ClearheadError(f"{command.records} holds records of other studies: name another")
    given = command.scheme or (ALL,)
    names = [name for word in given for name in (every() if word == ALL else [word])]
    return [scheme(name) for name in dict.fromkeys(names)]


def _measure(
    command: Command, path: str, name: str, schemes: list["Scheme"]
) -> list[dict[str, Any]]:
    from transformers.utils import logging

    from clearhead.data import prepare
    from clearhead.eval import load_questions
    from clearhead.experiments import quantization
    from clearhead.experiments.checkpoints import load_model

    model, tokenizer = load_model(path, trust_remote_code=command.trust_remote_code)
    # What transformers warns of from here on, such as attention that is out of reach, is a result.
    logging.set_verbosity_error()
    corpus = prepare(command.data, tokenizer=tokenizer, progress=say)
    read = quantization.texts(corpus, length=command.length, tokens=command.tokens, schemes=schemes)
    if command.choices is not None:
        questions = load_questions(command.choices, command.questions)
        read = replace(read, questions=questions, tokenizer=tokenizer)
    found = list(quantization.measured(model, read, schemes, name=name, progress=say))
    described = {
        "data": corpus.describe(),
        "choices": None if command.choices is None else command.choices.name,
        "questions": found[0]["questions"],
        "chance": found[0]["chance"],
    }
    return [quantization.header(model, read, name=name, path=path, **described), *found]
