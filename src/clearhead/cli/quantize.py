"""Simulate models in few bits, and measure perplexity and accuracy by scheme. Or save models in few
bits and measure those: --save for servers, --deploy for torchao.

examples:
  clearhead quantize ./SmolLM2-135M --scheme w8a8-coarse w8a8-token w4-channel
  clearhead quantize ./SmolLM2-135M --scheme w8a8-static --save served --data.data books
  clearhead quantize MODEL --deploy int8-dynamic-tensor --output runs/int8
"""

from clearhead.lab.sweep_configs import QuantizeConfig as Command


def run(command: Command) -> int:
    if command.save is not None or command.deploy or command.output is not None:
        from clearhead.lab.saving import run_deployment, run_saving

        (run_deployment if command.save is None else run_saving)(command)
        return 0
    from clearhead.cli.publishing import publish_sweep

    return publish_sweep(command, command.page, command.records)
