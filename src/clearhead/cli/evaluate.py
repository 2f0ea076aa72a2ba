"""clearhead eval: perplexity of a model at several lengths."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.models import load_model
from clearhead.cli.options import parse
from clearhead.data import DataConfig, prepare
from clearhead.errors import ClearheadError
from clearhead.eval import lengths
from clearhead.report import append


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to measure, on what text."""

    model: Positional[str]
    """A checkpoint's folder (RUN/final), or a hub name."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    """Window lengths in tokens."""
    tokens: int = 65_536
    """Validation tokens read at each length."""
    records: Path | None = None
    """Append the results to this file as records."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is the model's own."""


def run(words: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    command = parse(
        Command, words, verb="eval", description="Perplexity on held-out text, in float32."
    )
    if not command.lengths or min(command.lengths) < 2 or command.tokens < 2:
        raise ClearheadError("lengths and tokens must be at least 2, so that a token has a context")
    model, tokenizer = load_model(command.model)
    corpus = prepare(
        replace(command.data, tokenizer=tokenizer.name_or_path),
        progress=lambda line: print(line, file=sys.stderr),
    )
    found = lengths(model, corpus, lengths=command.lengths, tokens=command.tokens)
    table = Table(title=command.model)
    for heading in ("length", "perplexity", "loss, nats a token"):
        table.add_column(heading, justify="right")
    for length in command.lengths:
        row = {line["metric"]: line for line in found if line["length"] == length}
        perplexity, loss = row["perplexity"]["value"], row["loss"]["value"]
        shown = [row["perplexity"].get("reason", ""), ""]
        if perplexity is not None:
            shown = [f"{perplexity:.3f}", f"{loss:.4f}"]
        table.add_row(f"{length:,}", *shown)
    Console().print(table)
    if command.records is not None:
        name = Path(command.model).name
        header = {"kind": "run", "run": name, "preset": name, "size": "", "seed": 0}
        append(command.records, header | {"data": corpus.describe()})
        for line in found:
            append(command.records, {"kind": "measure", "run": name, **line})
    return 0
