"""Train one model; OUTPUT/final is then a plain Hugging Face checkpoint.

examples:
  clearhead train sas-p --data.data my/texts --train.tokens 2000000 --output runs/sas-p
  clearhead train --from ./SmolLM2-135M --data.data my/texts --train.only '*attn*'
  clearhead train --resume runs/sas-p --train.tokens 4000000
"""

from dataclasses import replace
from pathlib import Path

from clearhead.cli.options import given, said_once
from clearhead.errors import ClearheadError
from clearhead.lab.configs import TrainJob as Command
from clearhead.lab.configs import continued_recipe
from clearhead.metavars import place
from clearhead.records.identity import canonical, differences
from clearhead.terminal import say


def default(words: list[str]) -> Command | None:
    """The settings of the run to resume, or the defaults of training from a model."""
    if (folder := given(words, "--resume")) is not None:
        from clearhead.lab.training import recorded

        return recorded(Path(place(folder)))
    return Command(train=continued_recipe()) if given(words, "--from") else None


def run(command: Command) -> int:
    from clearhead.lab.training import recorded, run_training
    from clearhead.records.manifest import verify_model
    from clearhead.train.run_dir import FINAL, is_finished

    if command.resume is not None:
        with said_once():
            begun = recorded(command.resume)
            command = _extended(command, begun)
            if command.train.tokens == begun.train.tokens and is_finished(begun.output):
                # A kill after its end leaves nothing to go on with.
                final = begun.output / FINAL
                verify_model(final)
                say(
                    f"the run in {begun.output} is finished: its model is in {final}; extend it by "
                    "more --train.tokens"
                )
                return 0
    result = run_training(command)
    if result.stop_signal is not None:
        say(f"stopped and saved at step {result.steps}: go on by --resume {command.output}")
        return 128 + result.stop_signal
    say(f"loss {result.final_loss:.4f}; model: {command.output / 'final'}")
    return 0


def _extended(command: Command, begun: Command) -> Command:
    """The run with what a person may change of it.

    Raises:
        ClearheadError: for another change.
    """
    from clearhead.train.run_dir import FREE_KEYS

    free = {f"--train.{key.replace('_', '-')}" for key in FREE_KEYS | {"tokens"}}
    free |= {"--track", "--resume", "--data.cache", "--trust-remote-code"}
    # The same content may lie elsewhere: its fingerprint is compared, not its place.
    free |= {"--data.data", "--data.tokenizer"} | ({"--from"} if begun.base else set())
    own = {"preset": "preset", "base": "--from", "set": "--set"}  # of a field; others have its name
    names = [name for name, _, _ in differences(canonical(begun), canonical(command))]
    changed = {own.get(one.split(".")[0], f"--{one.replace('_', '-')}") for one in names}
    if fixed := sorted(changed - free):
        raise ClearheadError(
            f"a run is resumed with its own settings: leave out {', '.join(fixed)}, or start "
            "another run"
        )
    if command.train.tokens == begun.train.tokens:
        return command
    planned = begun.train.schedule_tokens or begun.train.tokens
    return replace(command, train=replace(command.train, schedule_tokens=planned))
