"""clearhead eval: perplexity of a model at several lengths, or its loss at hidden tokens."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from clearhead.cli.models import load_model
from clearhead.cli.options import parse
from clearhead.data import Corpus, DataConfig, prepare, with_mask_token
from clearhead.data.masking import SHARE
from clearhead.errors import ClearheadError
from clearhead.eval import lengths, masked_loss
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
    mask: float | None = None
    """Of a masked language model: the share of tokens hidden; 0.25 where not given."""
    records: Path | None = None
    """Append the results to this file as records."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is the model's own."""


def run(words: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    command = parse(
        Command,
        words,
        verb="eval",
        description="Perplexity on held-out text, or for a masked model its "
        "loss at hidden tokens, in float32.",
    )
    if not command.lengths or min(command.lengths) < 2 or command.tokens < 2:
        raise ClearheadError("lengths and tokens must be at least 2, so that a token has a context")
    model, tokenizer = load_model(command.model, kinds=("causal", "masked"))
    masked = "MaskedLM" in type(model).__name__
    if command.mask is not None and not masked:
        raise ClearheadError(f"{command.model} predicts the next token: leave mask out")
    corpus = prepare(
        replace(command.data, tokenizer=tokenizer.name_or_path),
        progress=lambda line: print(line, file=sys.stderr),
    )
    if masked:
        found = _masked(command, model, corpus)
        shown = ("masked loss", "masked accuracy")
        headings = ("loss at hidden tokens, nats", "hidden tokens found")
    else:
        found = lengths(model, corpus, lengths=command.lengths, tokens=command.tokens)
        shown = ("perplexity", "loss")
        headings = ("perplexity", "loss, nats a token")
    table = Table(title=command.model)
    for heading in ("length", *headings):
        table.add_column(heading, justify="right")
    for length in command.lengths:
        row = {line["metric"]: line for line in found if line["length"] == length}
        cells = [row[metric] for metric in shown]
        words = [f"{c['value']:.4f}" if c["value"] is not None else "" for c in cells]
        table.add_row(f"{length:,}", words[0] or cells[0].get("reason", ""), *words[1:])
    Console().print(table)
    if command.records is not None:
        name = Path(command.model).name
        header = {"kind": "run", "run": name, "preset": name, "size": "", "seed": 0}
        append(command.records, header | {"data": corpus.describe()})
        for line in found:
            append(command.records, {"kind": "measure", "run": name, **line})
    return 0


def _masked(command: Command, model: Any, corpus: Corpus) -> list[dict[str, Any]]:
    share = SHARE if command.mask is None else command.mask
    corpus = with_mask_token(corpus)
    return [
        line
        for length in command.lengths
        for line in masked_loss(model, corpus, length=length, tokens=command.tokens, share=share)
    ]
