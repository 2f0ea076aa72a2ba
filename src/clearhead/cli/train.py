"""clearhead train: one model."""

from dataclasses import dataclass, replace
from pathlib import Path

from clearhead.cli.options import given, parse, said_once
from clearhead.errors import ClearheadError
from clearhead.lab.configs import TrainJob, continued_recipe
from clearhead.metavars import place
from clearhead.records.identity import canonical, differences
from clearhead.terminal import say


@dataclass(frozen=True, kw_only=True)
class Command(TrainJob):
    """One training run."""

    resume: Path | None = None
    """Go on with the run in this folder, whose run.json has all settings. A larger --train.tokens
    extends a run; --train.save-every, --train.keep, --train.log-every, --track and the division
    among processes may change. If the run's text, tokenizer or first model have moved, --data.data,
    --data.tokenizer and --from name their new places."""


def run(words: list[str]) -> int:
    with said_once():
        folder = given(words, "--resume")
        begun = None if folder is None else _begun(Path(place(folder)))
        command = _parse(words, begun or _usual(given(words, "--from")))
        if begun is not None:
            command = _extended(command, begun)
            if command.train.tokens == begun.train.tokens and _finished(begun.output):
                return 0
    from clearhead.lab.training import run_training

    resume, command = command.resume is not None, replace(command, resume=None)
    result = run_training(command, resume=resume)
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


def _begun(output: Path) -> Command:
    """The run in `output` as a command, with the settings that it has now."""
    from clearhead.lab.training import recorded
    from clearhead.train.run_dir import require_run

    require_run(output)
    return recorded(Command, output)


def _extended(command: Command, begun: Command) -> Command:
    """The run with what a person may change of it.

    Raises:
        ClearheadError: for another change.
    """
    from clearhead.train.run_dir import FREE_KEYS

    keys = FREE_KEYS | {"tokens"}
    settings = {f"--train.{key.replace('_', '-')}" for key in keys}
    free = settings | {"--track", "--resume", "--data.cache", "--trust-remote-code"}
    # The same content may lie elsewhere: its fingerprint is compared, not its place.
    free |= {"--data.data", "--data.tokenizer"} | ({"--from"} if begun.base else set())
    changed = {_option(name) for name, _, _ in differences(canonical(begun), canonical(command))}
    if fixed := sorted(changed - free):
        raise ClearheadError(
            f"a run is resumed with its own settings: leave out {', '.join(fixed)}, or start "
            "another run"
        )
    before = begun.train
    if command.train.tokens == before.tokens:
        return command
    planned = before.schedule_tokens or before.tokens
    return replace(command, train=replace(command.train, schedule_tokens=planned))


def _option(name: str) -> str:
    """The option that sets a field of the command, by its dotted name."""
    named = {"preset": "preset", "base": "--from", "set": "--set"}
    return named.get(name.split(".")[0], f"--{name.replace('_', '-')}")
