"""Measure attention sinks, outliers, order and rank of one or two Hugging Face models on held-out
text. Print a table; write records and a page.

examples:
  clearhead diagnose ./SmolLM2-135M --data.data my/texts
  clearhead diagnose init:sas init:transformer --set num_hidden_layers=24 --output runs/at-the-start
"""

from clearhead.lab.sweep_configs import DiagnoseConfig as Command


def run(command: Command) -> int:
    from clearhead.cli.publishing import publish_sweep

    return publish_sweep(command, command.output / "diagnosis.html")
