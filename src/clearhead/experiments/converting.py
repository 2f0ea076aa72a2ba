"""A model of one family or mechanism as one of another, and how far apart they are."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead import terminal
from clearhead.data.sources import STDLIB
from clearhead.errors import ClearheadError
from clearhead.eval.distance import distance
from clearhead.experiments.calibration import added_sinks, calibrate, check_sinks, sample
from clearhead.experiments.convert_config import AUTO, ConvertConfig
from clearhead.experiments.prefixes import (
    SEARCHED,
    Prefix,
    check_filled,
    check_prefix,
    difference_after,
    fill,
    given_prefix,
    searched_prefix,
)
from clearhead.experiments.run_setup import load_model, require_own_tokenizer
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.conversion import (
    TOLERANCE,
    converted,
    for_llama_cpp,
    for_serving,
    imported,
    in_float32,
    logit_difference,
    require_convertible,
    with_equal_logits,
)
from clearhead.models.equalised import check_equalised, equalised
from clearhead.models.inspection import dtype_name, longest_text, within_memory
from clearhead.models.loading import load_tokenizer
from clearhead.models.rotated import Part, check_rotation, rotated
from clearhead.models.starts import changed, check_baseline, started, target
from clearhead.nn.key_value import KeyValue
from clearhead.nn.sink import AT_REST
from clearhead.records import manifest
from clearhead.records.files import publish_folder, read_json, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.train.checkpoint import save_pretrained, whole

RECORD = "conversion.json"  # in the folder of the converted model
OF_A_PREFIX = {"normalizer", "prefix_length", "mlp_rotation"}  # changes beside which it is kept


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model, what became of it in words, and its record."""

    model: Any
    record: dict[str, Any]
    lines: list[str] = field(default_factory=list)


def run_conversion(
    config: ConvertConfig, *, say: Callable[[str], None], work: object = None
) -> None:
    """Convert a model, write it with its record, and say what became of it.

    Raises:
        ClearheadError: as the conversions below; for an output that exists, a tokenizer that is
            another model's, and a run's checkpoint that is to change too.
    """
    settings = config.settings()
    require_new(config.output)
    earlier = _of_the_source(config.model)
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
        say(f"{type(joined).__name__} of a checkpoint: {config.output}")
        return
    require_convertible(config.model, trust_remote_code=config.trust_remote_code)
    model, tokenizer = load_model(config.model, trust_remote_code=config.trust_remote_code)
    require_own_tokenizer(config.model, model, tokenizer)
    if not config.changes:
        found = to_the_other_format(model, config.model, config.purpose)
    else:
        with in_float32(model) as rounded:
            found = to_other_mechanisms(model, tokenizer, config, settings, rounded=rounded)
    made = found.model
    with publish_folder(config.output) as folder:
        save_pretrained(made, tokenizer, folder)
        write_json(folder / RECORD, {**found.record, "before": earlier})
        manifest.seal(folder)
    for line in found.lines:
        say(line)
    outcome = _outcome(found.record, dtype_name(model), dtype_name(made))
    say(f"{type(model).__name__} → {type(made).__name__}, {outcome}: {config.output}")


def _outcome(record: dict[str, Any], before: str, after: str) -> str:
    if record.get("prefix"):  # checked, before any rounding
        return f"the same function after the prefix {record['prefix']['text']!r}"
    if not record["same_in_float32"]:
        return "another function, for clearhead train --from to go on with"
    if not record["same_function"]:
        return (
            f"with equal logits in float32; rounded to {after} they differ by "
            f"{record['relative']:.1e} of their size"
        )
    if before != after:
        return (
            f"with equal logits, in {after}: {before} would move them by more than "
            f"{TOLERANCE:.0e} of their size"
        )
    return "with equal logits"


def to_the_other_format(model: Any, name: str, purpose: str | None = None) -> Conversion:
    """The same function in the other library's format, or in one that servers load."""
    made = {None: converted, "serving": for_serving, "llama.cpp": for_llama_cpp}[purpose](model)
    record = _record(name, model, made)
    with in_float32(model), in_float32(made):
        relative = logit_difference(model, made)
    # Their float32 weights have been compared: what is left is what rounding does.
    same = {"same_in_float32": True, "same_function": relative <= TOLERANCE}
    return Conversion(model=made, record={**record, **same, "relative": relative})


def to_other_mechanisms(
    model: Any,
    tokenizer: Any,
    config: ConvertConfig,
    settings: dict[str, Any],
    *,
    rounded: Callable[[Any], Any],
) -> Conversion:
    """The same weights under other mechanisms, with the distance from the first model.

    Of the windows of the calibration text half calibrate or judge prefixes; the other half measures
    the distance, unless there is a text of its own.

    Args:
        model: in float32, as within `in_float32`.
        settings: `config.settings()`.
        rounded: gives the new model the first's 16 bits, where it has them.
    """
    prefix, equalise, calibration = config.prefix, config.equalise, config.calibrate
    basis: list[Part] = [part for part in config.rotate if part != "down"]
    changes = target(config.preset, settings)
    first = imported(model)
    check_baseline(config.preset, settings, first.config)
    length = min(config.length, model.config.max_position_embeddings)
    # All that can be refused is refused before the search and the rotation take their minutes.
    chosen = None
    if prefix not in (None, AUTO):
        chosen = given_prefix(prefix, tokenizer, first.config.vocab_size)
    if prefix is not None:
        tokens = SEARCHED if chosen is None else len(chosen.ids)
        check_prefix(first.config, changes, tokens)
        changes |= {"normalizer": "key-value", "prefix_length": tokens}
    check_rotation(first.config, basis)
    with torch.device("meta"):
        outline = ClearheadForCausalLM(changed(first.config, changes))
    if equalise:
        check_equalised(outline)
    added = added_sinks(first.config, outline.config)
    if config.sink_logit is not None and not added:
        raise ClearheadError(
            "--sink-logit is for the sinks that --to sink or normalizer=sink adds, and has no "
            "effect without: a model keeps its own"
        )
    if calibration is not None and prefix is None:
        _check_calibration(first, outline, length)
    calibrating, windows = list[Tensor](), list[Tensor]()
    if calibration is not None:
        twice: Literal[1, 2] = 1 if config.text else 2
        count = twice * config.windows
        read = sample(calibration, tokenizer, length=length, count=count, least=twice)
        calibrating, windows = read[::twice], read[1::2]
    read_from = config.text or calibration or STDLIB
    if not windows or config.text is not None:
        windows = sample(read_from, tokenizer, length=length, count=config.windows)
    measures, lines = list[dict[str, Any]](), list[str]()
    before = first
    if prefix == AUTO:
        chosen = searched_prefix(first, tokenizer, calibrating)
        changes["prefix_length"] = len(chosen.ids)
    if config.learn_rotation:
        terminal.say("learning a rotation of the residual stream: a minute at a width of 576")
    if basis:
        turned = rotated(first, basis, seed=config.seed, learn=config.learn_rotation)
        before = with_equal_logits(first, turned)
    start = started(before, changes)
    made = start.model
    if equalise:
        made = with_equal_logits(made, equalised(made))
    length = min(length, longest_text(made) or length)  # learned keys may have taken positions
    windows = [window[:length] for window in windows]

    def measure(what: str, **inputs: Any) -> float:
        with within_memory(f"give a smaller --length than {length}"):
            found = distance(first, made, windows, **inputs)
        measures.append({"what": what, **asdict(found)})
        # After a prefix logits are others by intent: how far says nothing of a fault.
        largest = "" if chosen else f", largest difference of a logit {found.largest:.2g}"
        lines.append(
            f"{what}: KL {found.divergence:z.4f} nats a token, perplexity "
            f"{found.perplexity_before:.2f} → {found.perplexity:.2f}{largest} "
            f"({found.tokens:,} tokens of {read_from})"
        )
        return found.relative

    layers: Any = made.model.layers
    sinks = [layers[index].self_attn.normalizer for index in added]
    if config.sink_logit is not None:
        for sink in sinks:
            nn.init.constant_(sink.logit, config.sink_logit)
    shares = list[dict[str, Any]]()
    # Hidden tokens take positions still, but those in whose place learned keys stand.
    places = torch.arange(length, device=made.device)[None]
    hidden = {
        "attention_mask": (places >= made.config.prefix_length).long(),
        "position_ids": (places - made.model.needs.places).clamp_min(0),
    }
    if chosen is not None:
        fill(made, before, torch.tensor([chosen.ids]))
        after = check_filled(made, first, chosen.ids, changes.keys() - OF_A_PREFIX)
        relative = measure("with the prefix, against the model without it")
    elif not calibrating:
        relative = measure("start")
    elif _has_keys(made):
        measure("start")
        fill(made, before, torch.stack(calibrating)[:, : made.config.prefix_length])
        measure("keys and values of first tokens; the text's own hidden", **hidden)
        relative = measure("keys and values of first tokens")
    else:
        measure("start")
        calibrate(made, calibrating, added, without_first=True)
        measure("calibrated without the first token, which is hidden", **hidden)
        shares = calibrate(made, calibrating, added, without_first=False)
        relative = measure("calibrated beside the first token")
    if sinks and not calibrating and all(sink.rests for sink in sinks):
        lines.append(f"{AT_REST}: give --calibrate TEXT, or --sink-logit 0 for softmax-1")
    same_in_float32 = relative <= TOLERANCE
    made = rounded(made)
    if made.dtype.itemsize == 2:
        bits = dtype_name(made)
        with in_float32(made):
            relative = measure(f"rounded to {bits}")
            if chosen is not None:
                after = difference_after(made, first, chosen.ids)
    if chosen is not None:
        lines.insert(0, _prefix_line(chosen, made, after))
    return Conversion(
        model=made,
        lines=lines + start.in_words(),
        record={
            **_record(config.model, model, made),
            "changes": changes,
            "rotated": list(basis),
            "seed": config.seed if basis else None,
            "learned_rotation": config.learn_rotation,
            "equalised": equalise,
            "same_in_float32": same_in_float32,
            "same_function": relative <= TOLERANCE,
            "relative": relative,
            "new": start.new,
            "dropped": start.dropped,
            "measures": measures,
            "text": read_from,
            "calibration": calibration,
            "length": length,
            "windows": len(windows),
            "shares": shares,
            "prefix": None if chosen is None else {**asdict(chosen), "relative": after},
        },
    )


def _of_the_source(model: str) -> dict[str, Any] | None:
    """The record of the conversion that made the source, with its prefix."""
    path = Path(model) / RECORD
    return read_json(path, "delete it to convert without it") if path.is_file() else None


def _check_calibration(
    first: ClearheadForCausalLM, outline: ClearheadForCausalLM, length: int
) -> None:
    """Refuse a calibration that a model has no place for, or in whose place it has learned keys."""
    if not _has_keys(outline):
        check_sinks(first.config, outline.config)
    elif _has_keys(first):
        raise ClearheadError(
            "--calibrate would replace the keys and values that this model has: give --text to "
            "measure on, or convert the model that it was made from"
        )
    elif (places := outline.config.prefix_length) >= length:
        raise ClearheadError(
            f"prefix_length={places} takes the first tokens of longer windows than --length "
            f"{length}: give --length {places + 1} or more"
        )


def _prefix_line(prefix: Prefix, made: ClearheadForCausalLM, after: float) -> str:
    """The line that compares the logits with the first model's after the prefix."""
    line = (
        f"prefix {prefix.text!r}, {len(prefix.ids)} tokens: logits are those of the first model "
        f"after it, to {after:.1g} of their size"
    )
    if made.dtype.itemsize == 2:
        line += f" as rounded to {dtype_name(made)}"
    if (window := made.config.sliding_window) is not None:
        line += (
            f", within the sliding window of {window} tokens; beyond it every token still sees the "
            "prefix, and the first model's would not"
        )
    return line


def _has_keys(model: ClearheadForCausalLM) -> bool:
    """True for learned keys and values."""
    return any(isinstance(module, KeyValue) for module in model.modules())


def _record(name: str, model: Any, made: Any) -> dict[str, Any]:
    kinds = {"from": type(model).__name__, "to": type(made).__name__}
    return {"kind": "conversion", "of": name, **kinds, **provenance(made.device)}
