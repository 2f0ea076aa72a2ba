"""clearhead train: one model."""

from dataclasses import replace
from pathlib import Path

from clearhead.cli.options import given, parse, said_once
from clearhead.errors import ClearheadError
from clearhead.lab.configs import TrainJob as Command
from clearhead.lab.configs import continued_recipe
from clearhead.metavars import place
from clearhead.records.identity import canonical, differences
from clearhead.terminal import say


def run(words: list[str]) -> int:
    with said_once():
        begun = None
        if (folder := given(words, "--resume")) is not None:
            from clearhead.lab.training import recorded

            begun = recorded(Path(place(folder)))
        command = _parse(words, begun or _usual(given(words, "--from")))
        if begun is not None:
            command = _extended(command, begun)
            if command.train.tokens == begun.train.tokens and _finished(begun.output):
                return 0
    from clearhead.lab.training import run_training

    result = run_training(command)
    if result.stop_signal is not None:
        say(f"stopped and saved at step {result.steps}: go on by --resume {command.output}")
        return 128 + result.stop_signal
    say(f"loss {result.final_loss:.4f}; model: {command.output / 'final'}")
    return 0


def _finished(output: Path) -> bool:
    """Say so where the run is finished: a kill after its end leaves nothing to go on with."""
    from clearhead.records.manifest import verify_model
    from clearhead.train.run_dir import FINAL, is_finished

    if not is_finished(output):
        return False
    verify_model(output / FINAL)
    say(
        f"the run in {output} is finished: its model is in {output / FINAL}; extend it by more "
        "--train.tokens"
    )
    return True


def _parse(words: list[str], usual: Command) -> Command:
    return parse(
        Command,
        words,
        verb="train",
        description="Train one model; OUTPUT/final is then a plain Hugging Face checkpoint.",
        examples=(
            "sas-p --data.data my/texts --train.tokens 2000000 --output runs/sas-p",
            "--from ./SmolLM2-135M --data.data my/texts --train.only '*attn*'",
            "--resume runs/sas-p --train.tokens 4000000",
        ),
        presets=True,
        default=usual,
    )


def _usual(base: str | None) -> Command:
    """The defaults; going on from a model has its own."""
    return Command() if base is None else Command(train=continued_recipe())


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
    changed = {_option(name) for name, _, _ in differences(canonical(begun), canonical(command))}
    if fixed := sorted(changed - free):
        raise ClearheadError(
            f"a run is resumed with its own settings: leave out {', '.join(fixed)}, or start "
            "another run"
        )
    if command.train.tokens == begun.train.tokens:
        return command
    planned = begun.train.schedule_tokens or begun.train.tokens
    return replace(command, train=replace(command.train, schedule_tokens=planned))


def _option(name: str) -> str:
    """The option that sets a field of the command, by its dotted name."""
    named = {"preset": "preset", "base": "--from", "set": "--set"}
    return named.get(name.split(".")[0], f"--{name.replace('_', '-')}")
