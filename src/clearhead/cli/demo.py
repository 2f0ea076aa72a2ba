"""Train small models on Python's own library and on a generated text, in five minutes on two cores.
Show the standard Transformer's defects, what repairs change and what they do not, on one page.

examples:
  clearhead demo
  clearhead demo --pretrained ./SmolLM2-135M
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.metavars import Model, OpensModels


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """A demonstration and its page."""

    output: Path = Path("demo")
    """Folder of the models, records and page; the same command goes on where it stopped."""
    pretrained: Model | None = None
    """A causal model to diagnose besides: a folder, or a hub name such as
    HuggingFaceTB/SmolLM2-135M. Adds a minute for 135 M parameters."""


def run(command: Command) -> int:
    from clearhead.cli.publishing import publish
    from clearhead.lab.demo import run_demo, studies
    from clearhead.progress import Line
    from clearhead.report import load
    from clearhead.report.demo import page

    parts, trust = studies(command.output), command.trust_remote_code
    options: Any = {"pretrained": command.pretrained, "trust_remote_code": trust}
    with Line() as work:
        files = run_demo(parts, command.output, work=work, **options)
    publish(page(*map(load, files.values())), command.output / "report.html")
    return 0
