"""A ladder: one comparison at several sizes, its tokens in proportion to the parameters."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.experiments.compare import compare
from clearhead.experiments.comparison_run import relabelled
from clearhead.experiments.configs import RECORDS, CompareConfig
from clearhead.models import plan, preset
from clearhead.named_models import BASELINE, SIZES
from clearhead.progress import Work
from clearhead.ranges import check_distinct
from clearhead.records.files import write_text
from clearhead.records.loading import as_line, load
from clearhead.records.runs import Records
from clearhead.train.world import joined

MEASURE_EVERY = 0.05  # where the comparison names none: the loss on the way is what is compared


def ladder(
    config: CompareConfig, *, say: Callable[[str], None], work: Work | None = None
) -> Records:
    """Run the comparison at each of `config.sizes`, in a folder each, and join the records.

    `compare` says what it raises, and how it goes on where it stopped.
    """
    rungs = list(rungs_of(config))
    for one in rungs:
        one.check()
    work = Work(say=say) if work is None else work
    work.start(sum(len(one.arms) * len(one.seeds) for one in rungs))
    for one in rungs:
        compare(one, say=say, work=work)
    with joined(config.train.timeout) as world:
        parts = [(one.output / RECORDS, one.label) for one in rungs]
        lines = chain.from_iterable(relabelled(path, label=label) for path, label in parts)
        world.by_first(lambda: write_text(config.output / RECORDS, "".join(map(as_line, lines))))
    return load(config.output / RECORDS)


def rungs_of(config: CompareConfig) -> Iterator[CompareConfig]:
    """The comparison of each size, the smallest model first.

    `train.tokens` is the budget of the smallest; a model of n times its parameters, embeddings left
    out, reads n times its tokens.

    Raises:
        ClearheadError: for a size that is none, or twice; for models that have their own.
    """
    check_distinct(config, "sizes")
    if config.base is not None:
        raise ClearheadError("sizes has no effect on the model of --from: leave it out")
    shapes = {name: _shape(name, config) for name in config.sizes}
    models = {name: preset(BASELINE, size, **shape) for name, (size, shape) in shapes.items()}
    parameters = {name: plan(model).non_embedding_parameters for name, model in models.items()}
    smallest = min(parameters.values())
    step = config.train.tokens_per_step
    for name in sorted(shapes, key=parameters.__getitem__):
        size, shape = shapes[name]
        tokens = config.train.tokens * parameters[name] / smallest
        label = f"width {name}" if name.isdecimal() else name
        yield replace(
            config,
            size=size,
            set={**config.set, **shape},
            train=replace(config.train, tokens=max(1, round(tokens / step)) * step),
            measure_every=config.measure_every or MEASURE_EVERY,
            output=config.output / label.replace(" ", "-"),
            label=", ".join(filter(None, (config.label, label))),
        )


def _shape(name: str, config: CompareConfig) -> tuple[str, dict[str, Any]]:
    """The named size, and the changes that a width makes: heads stay as wide as they are."""
    if not name.isdecimal():
        return name, {}
    usual = {**SIZES[config.size], **config.set}
    head = usual["hidden_size"] // usual["num_attention_heads"]
    width = int(name)
    if not width or width % head:
        raise ClearheadError(
            f"sizes names a width of {name}: give a multiple of {head}, the width of a head at "
            f"{config.size}, or a named size"
        )
    return config.size, {"hidden_size": width, "num_attention_heads": width // head}
