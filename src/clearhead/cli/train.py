"""Train one model; OUTPUT/final is then a plain Hugging Face checkpoint.

examples:
  clearhead train sas-p --data.data my/texts --train.tokens 2000000 --output runs/sas-p
  clearhead train --from ./SmolLM2-135M --data.data my/texts --train.only '*attn*'
  clearhead train --resume runs/sas-p --train.tokens 4000000
"""

from pathlib import Path

from clearhead.cli.options import given
from clearhead.lab.configs import TrainJob as Command
from clearhead.lab.configs import continued_recipe
from clearhead.metavars import place
from clearhead.terminal import say


def default(words: list[str]) -> Command | None:
    """The settings of the run to resume, or the defaults of training from a model."""
    if (folder := given(words, "--resume")) is not None:
        from clearhead.lab.runs import recorded

        return recorded(Path(place(folder)))
    return Command(train=continued_recipe()) if given(words, "--from") else None


def run(command: Command) -> int:
    from clearhead.lab.runs import extended, recorded, run_training
    from clearhead.records.manifest import verify_model
    from clearhead.train.run_dir import FINAL, is_finished

    if command.resume is not None:
        begun = recorded(command.resume)
        command, final = extended(command, begun), begun.output / FINAL
        if command.train.tokens == begun.train.tokens and is_finished(begun.output):
            verify_model(final)  # a kill after its end leaves nothing to go on with
            say(f"the run is finished: {final} is its model; more --train.tokens extend it")
            return 0
    result = run_training(command)
    if result.stop_signal is not None:
        say(f"stopped and saved at step {result.steps}: go on by --resume {command.output}")
        return 128 + result.stop_signal
    say(f"loss {result.final_loss:.4f}; model: {command.output / 'final'}")
    return 0
