"""clearhead quantize: what few bits cost a model, and models in few bits to keep."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from clearhead.cli.models import load_model
from clearhead.cli.options import parse
from clearhead.data import DataConfig, prepare
from clearhead.errors import ClearheadError
from clearhead.eval import load_questions
from clearhead.experiments import quantization
from clearhead.quantize import Scheme, every, scheme
from clearhead.report.quantization import load, write
from clearhead.report.quantization import parse as parse_lines
from clearhead.report.quantization_page import write_quantization
from clearhead.report.quantization_tables import to_console

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to measure, on what text."""

    models: Positional[tuple[str, ...]]
    """Checkpoints' folders (RUN/final), or hub names."""
    scheme: tuple[str, ...] = (ALL,)
    """Names such as w8a8-coarse, w8a8-fine, w4-channel, w3-group64, logits6-row; or all."""
    length: int = 256
    """Tokens in a window of text."""
    tokens: int = 32_768
    """Validation tokens read under each scheme."""
    choices: Path | None = None
    """Multiple-choice questions, a .jsonl(.gz) file with question (or context), choices, label."""
    questions: int = 200
    """The first so many questions are asked."""
    records: Path | None = None
    """Add the results to this file; the page then shows all that it holds."""
    page: Path | None = None
    """Write the page of bits against perplexity here."""
    title: str = "What few bits cost"
    """The page's title."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is each model's own."""


def run(words: list[str]) -> int:
    from rich.console import Console

    command = parse(
        Command,
        words,
        verb="quantize",
        description="What few bits cost a model, simulated: perplexity and accuracy by scheme.",
    )
    schemes = _checked(command)
    lines: list[dict[str, Any]] = []
    for path, name in zip(command.models, quantization.distinct(command.models), strict=True):
        found = _measure(command, path, name, schemes)
        if command.records is not None:
            write(command.records, found)
        lines += found
        Console().print(to_console(parse_lines(found)[0]))
    if command.page is not None:
        shown = parse_lines(lines) if command.records is None else load([command.records])
        write_quantization(shown, command.page, title=command.title)
        print(f"page: {command.page}")
    return 0


def _checked(command: Command) -> list[Scheme]:
    """The schemes asked for, after everything that can be refused before a model is loaded."""
    if not command.models or not command.scheme:
        raise ClearheadError("nothing to do: give a model, and a scheme or all")
    if len(set(command.models)) < len(command.models):
        raise ClearheadError("a model is given twice: give each once")
    if command.length < 2 or command.tokens < command.length or command.questions < 1:
        raise ClearheadError(
            "length must be at least 2, tokens at least one length, questions at least 1; found "
            f"{command.length}, {command.tokens}, {command.questions}"
        )
    if command.records is not None and command.records.exists():
        load([command.records])  # refuses a file of something else before the work
    names = [each for given in command.scheme for each in (every() if given == ALL else [given])]
    return [scheme(name) for name in dict.fromkeys(names)]


def _measure(command: Command, path: str, name: str, schemes: list[Scheme]) -> list[dict[str, Any]]:
    from transformers.utils import logging

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    model, tokenizer = load_model(path)
    # What transformers warns of from here on, such as attention that is out of reach, is a result.
    logging.set_verbosity_error()
    corpus = prepare(replace(command.data, tokenizer=tokenizer.name_or_path), progress=progress)
    read = quantization.texts(corpus, length=command.length, tokens=command.tokens, schemes=schemes)
    if command.choices is not None:
        questions = load_questions(command.choices, limit=command.questions)
        read = replace(read, questions=questions, tokenizer=tokenizer)
    found = list(quantization.measured(model, read, schemes, name=name, progress=progress))
    described = {
        "data": corpus.describe(),
        "choices": None if command.choices is None else command.choices.name,
        "questions": len(read.questions),
        "chance": found[0]["chance"],
    }
    return [quantization.header(model, read, name=name, path=path, **described), *found]
