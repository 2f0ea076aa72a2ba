"""A model of one family or mechanism as one of another, and how far apart they are."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead import terminal
from clearhead.arguments import overrides
from clearhead.errors import ClearheadError
from clearhead.eval.distance import distance
from clearhead.experiments.calibration import calibrate, check_sinks, sample
from clearhead.experiments.convert_config import ConvertConfig
from clearhead.experiments.prefixes import (
    AUTO,
    Prefix,
    check_filled,
    check_prefix,
    fill,
    given_prefix,
    searched_prefix,
)
from clearhead.experiments.run_setup import load_model, require_own_tokenizer
from clearhead.models.conversion import (
    TOLERANCE,
    converted,
    for_serving,
    imported,
    in_float32,
    logit_difference,
    require_convertible,
    with_equal_logits,
)
from clearhead.models.equalised import equalised
from clearhead.models.inspection import longest_text, within_memory
from clearhead.models.loading import load_tokenizer
from clearhead.models.rotated import Part, rotated
from clearhead.models.starts import started, target
from clearhead.nn.key_value import KeyValue
from clearhead.nn.sink import Sink
from clearhead.nn.softmax1 import NOTHING
from clearhead.records import manifest
from clearhead.records.files import publish_folder, read_json, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.train.adapters import merge
from clearhead.train.checkpoint import save_pretrained, whole

RECORD = "conversion.json"  # in the folder of the converted model
RANDOM = "random tokens"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model, what became of it in words, and its record."""

    model: Any
    record: dict[str, Any]
    lines: list[str] = field(default_factory=list)


def run_conversion(config: ConvertConfig, say: Callable[[str], None]) -> None:
    """Convert a model, write it with its record, and say what became of it.

    Raises:
        ClearheadError: as the conversions below; for an output that exists, a tokenizer that is
            another model's, and parts of several processes that are to change too.
    """
    rotation = ["mlp_rotation=hadamard"] if "down" in config.rotate else []
    settings = overrides([*(word for word in config.to if "=" in word), *rotation])
    preset = next((word for word in config.to if "=" not in word), None)
    require_new(config.output)
    if (joined := whole(Path(config.model))) is not None:
        if config.changes or config.purpose:
            raise ClearheadError(
                "--to, --prefix, --rotate, --equalise and --for take a whole model: convert "
                "without them first, then that"
            )
        folder = Path(config.model)
        tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None
        with publish_folder(config.output) as temporary:
            save_pretrained(joined, tokenizer, temporary)
            manifest.seal(temporary)
        say(f"{type(joined).__name__}, joined from the parts of several processes: {config.output}")
        return
    require_convertible(config.model, trust_remote_code=config.trust_remote_code)
    model, tokenizer = load_model(config.model, trust_remote_code=config.trust_remote_code)
    merge(model)
    require_own_tokenizer(config.model, model, tokenizer)
    with in_float32(model) as rounded:
        if not config.changes:
            found = to_the_other_format(model, config.model, serving=config.purpose is not None)
        else:
            found = to_other_mechanisms(
                model,
                tokenizer,
                config.model,
                preset=preset,
                settings=settings,
                basis=[part for part in config.rotate if part != "down"],
                seed=config.seed,
                learn=config.learn_rotation,
                equalise=config.equalise,
                prefix=config.prefix,
                sink_logit=config.sink_logit,
                calibration=config.calibrate,
                text=config.text,
                length=config.length,
                count=config.windows,
            )
        made = rounded(found.model)
    with publish_folder(config.output) as folder:
        save_pretrained(made, tokenizer, folder)
        write_json(folder / RECORD, {**found.record, "before": _of_the_source(config.model)})
        manifest.seal(folder)
    for line in found.lines:
        say(line)
    same = found.record.get("same_function", True)
    say(
        f"{type(model).__name__} → {type(made).__name__}, "
        f"{'with equal logits' if same else 'another function'}: {config.output}"
    )


def to_the_other_format(model: Any, name: str, *, serving: bool = False) -> Conversion:
    """The same function in the other library's format, or in one that servers load."""
    made = for_serving(model) if serving else converted(model)
    record = _record(name, model, made)
    return Conversion(model=made, record={**record, "relative": logit_difference(model, made)})


def to_other_mechanisms(
    model: Any,
    tokenizer: Any,
    name: str,
    *,
    preset: str | None,
    settings: dict[str, Any],
    basis: Sequence[Part] = (),
    seed: int = 0,
    learn: bool = False,
    equalise: bool = False,
    prefix: str | None = None,
    sink_logit: float | None = None,
    calibration: str | None = None,
    text: str | None = None,
    length: int = 512,
    count: int = 8,
) -> Conversion:
    """The same weights under other mechanisms, with the distance from the first model.

    Args:
        basis, seed, learn: what is turned before, as in `rotated`.
        equalise: as in `equalised`, when all is turned.
        prefix: a text that is to stand before every text as learned keys and values, or "auto" to
            search for one on the calibration text.
        calibration: a source of text; half of the windows read calibrate the sinks or the learned
            keys and values, or judge prefixes; the other half measures the distance, unless there
            is a `text` of its own.
        text: a source of text to measure on; random tokens where there is neither.

    Raises:
        ClearheadError: as `imported`, `started`, `sample`, `calibrate` and those of `prefixes`.
    """
    changes = target(preset, settings)
    length = min(length, model.config.max_position_embeddings)
    calibrating, windows = list[Tensor](), list[Tensor]()
    if calibration is not None:
        twice: Literal[1, 2] = 1 if text else 2
        read = sample(calibration, tokenizer, length=length, count=twice * count, least=twice)
        calibrating, windows = read[::twice], read[1::2]
    if text is not None:
        windows = sample(text, tokenizer, length=length, count=count)
    elif not windows:
        windows = _random(model.config.vocab_size, length, count)
    first, measures, lines = imported(model), list[dict[str, Any]](), list[str]()
    before = first
    if learn:
        terminal.say("learning a rotation of the residual stream: a minute at a width of 576")
    if basis:
        before = with_equal_logits(first, rotated(first, basis, seed=seed, learn=learn))
    chosen = None
    if prefix is not None:
        check_prefix(before, changes)
        chosen = _prefix(prefix, first, tokenizer, calibrating)
        changes |= {"normalizer": "key-value", "prefix_length": len(chosen.ids)}
    start = started(before, changes)
    made = start.model
    if equalise:
        made = with_equal_logits(made, equalised(made))
    length = min(length, longest_text(made) or length)  # learned keys may have taken positions
    windows = [window[:length] for window in windows]
    read_from = text or calibration or RANDOM

    def measure(what: str, **inputs: Any) -> float:
        with within_memory(f"give a smaller --length than {length}"):
            found = distance(first, made, windows, **inputs)
        measures.append({"what": what, **found.record()})
        lines.append(
            f"{what}: KL {found.divergence:.4f} nats a token, perplexity "
            f"{found.perplexity_before:.2f} → {found.perplexity:.2f}, largest difference of a "
            f"logit {found.largest:.2g} ({found.tokens:,} tokens of {read_from})"
        )
        return found.relative

    sinks = [module for module in made.modules() if isinstance(module, Sink)]
    if sink_logit is not None:
        if not sinks:
            raise ClearheadError("--sink-logit has no effect without --to sink or normalizer=sink")
        for sink in sinks:
            nn.init.constant_(sink.logit, sink_logit)
    shares = list[dict[str, Any]]()
    hidden = torch.ones(1, length, dtype=torch.long, device=made.device)
    hidden[:, 0] = 0
    if chosen is not None:
        fill(made, before, torch.tensor([chosen.ids]))
        relative = check_filled(made, before, chosen.ids)
        lines.append(
            f"prefix {chosen.text!r}, {len(chosen.ids)} tokens: logits are those of the first "
            f"model after it, to {relative:.1g} of their size"
        )
        relative = measure("with the prefix, against the model without it")
    elif not calibrating:
        relative = measure("start")
    elif any(isinstance(module, KeyValue) for module in made.modules()):
        measure("start")
        fill(made, before, torch.stack(calibrating)[:, :1])
        measure("keys and values of first tokens; the text's own hidden", attention_mask=hidden)
        relative = measure("keys and values of first tokens")
    else:
        check_sinks(made)
        measure("start")
        calibrate(made, calibrating, without_first=True)
        measure("calibrated without the first token, which is hidden", attention_mask=hidden)
        shares = calibrate(made, calibrating, without_first=False)
        relative = measure("calibrated beside the first token")
    if sinks and not calibrating and all(bool((sink.logit <= NOTHING).all()) for sink in sinks):
        lines.append(
            f"the sinks rest at {NOTHING:g}, where training hardly moves them: give --calibrate "
            "TEXT, or --sink-logit 0 for softmax-1"
        )
    exact = relative <= TOLERANCE
    for what, names in (("new", start.new), ("dropped", start.dropped)):
        if names:
            lines.append(f"{what}: {', '.join(names)}")
    record = _record(name, model, made)
    return Conversion(
        model=made,
        lines=lines,
        record={
            **record,
            "changes": changes,
            "rotated": list(basis),
            "seed": seed if basis else None,
            "learned_rotation": learn,
            "equalised": equalise,
            "same_function": exact,
            "new": start.new,
            "dropped": start.dropped,
            "measures": measures,
            "text": read_from,
            "calibration": calibration,
            "length": length,
            "windows": len(windows),
            "shares": shares,
            "prefix": None if chosen is None else asdict(chosen),
        },
    )


def _of_the_source(model: str) -> dict[str, Any] | None:
    """The record of the conversion that made the source, with its prefix."""
    path = Path(model) / RECORD
    return read_json(path, "delete it to convert without it") if path.is_file() else None


def _prefix(text: str, model: Any, tokenizer: Any, windows: list[Tensor]) -> Prefix:
    if text != AUTO:
        if windows:
            raise ClearheadError(
                "--calibrate would have no effect beside a given --prefix: leave it out, or give "
                "--prefix auto"
            )
        return given_prefix(text, tokenizer)
    if not windows:
        raise ClearheadError("--prefix auto is searched for on a text: give --calibrate TEXT")
    return searched_prefix(model, tokenizer, windows)


def _record(name: str, model: Any, made: Any) -> dict[str, Any]:
    kinds = {"from": type(model).__name__, "to": type(made).__name__}
    return {"kind": "conversion", "of": name, **kinds, **provenance(made.device)}


def _random(vocabulary: int, length: int, count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return list(torch.randint(vocabulary, (count, length), generator=draw))
