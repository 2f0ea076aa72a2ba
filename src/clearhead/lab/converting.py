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
from clearhead.eval.sliding import distance
from clearhead.lab.calibration import added_sinks, calibrate, check_sinks, sample
from clearhead.lab.convert_config import AUTO, ConvertConfig
from clearhead.lab.prefixes import (
    SEARCHED,
    Prefix,
    check_after,
    check_prefix,
    difference_after,
    fill,
    given_prefix,
    searched_prefix,
)
from clearhead.lab.repaired import WINDOWS, in_three_lines, three_numbers
from clearhead.lab.run_setup import load_model, require_own_tokenizer
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
from clearhead.models.inspection import dtype_name, longest_text, within_memory
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.loading import load_tokenizer
from clearhead.models.memory import require_room
from clearhead.models.rotated import check_equalised, check_rotation, equalised, rotated
from clearhead.models.starts import changed, check_baseline, started, target
from clearhead.nn.key_value import KeyValue
from clearhead.nn.sink import AT_REST
from clearhead.records import manifest
from clearhead.records.files import publish_folder, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.train.checkpoint import save_pretrained, whole

RECORD = "conversion.json"  # in the folder of the converted model


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model, what became of it in words, and its record."""

    model: Any
    record: dict[str, Any]
    lines: list[str] = field(default_factory=list)


def run_conversion(
    config: ConvertConfig, *, say: Callable[[str], None] = terminal.say, work: object = None
) -> None:
    """Convert a model, write it with its record, and say what became of it.

    Raises:
        ClearheadError: as the conversions below; for an output that exists, a tokenizer that is
            another model's, and a run's checkpoint that is to change too.
    """
    config.settings()  # refuses words of another form
    require_new(config.output)
    if (joined := whole(Path(config.model))) is not None:
        if config.changes or config.purpose:
            raise ClearheadError(
                "--to, --prefix, --rotate, --equalise and --for take a whole model, not a run's "
                "checkpoint: convert it without them first, then the result"
            )
        folder = Path(config.model)
        tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None
        with publish_folder(config.output) as temporary:
            save_pretrained(joined, tokenizer, temporary)
            manifest.seal(temporary)
        say(f"{type(joined).__name__} of a checkpoint: {config.output}")
        return
    require_convertible(config.model, trust_remote_code=config.trust_remote_code)
    copies = 2.5 if config.equalise else 2  # half of a model is its MLPs' gated rows
    require_room(config.model, "convert", copies=copies, wide=True)
    model, tokenizer = load_model(config.model, trust_remote_code=config.trust_remote_code)
    require_own_tokenizer(config.model, model, tokenizer)
    if not config.changes:
        found = to_the_other_format(model, config.model, config.purpose)
    else:
        with in_float32(model) as rounded:
            found = to_other_mechanisms(model, tokenizer, config, rounded=rounded)
    made = found.model
    with publish_folder(config.output) as folder:
        save_pretrained(made, tokenizer, folder)
        write_json(folder / RECORD, found.record)
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


class _Distances:
    """Distances of a model under way from the first, on windows of text, and a line for each."""

    def __init__(self, first: Any, windows: list[Tensor], text: str, prefixed: bool) -> None:
        self.first, self.windows, self.text, self.prefixed = first, windows, text, prefixed
        self.measures, self.lines = list[dict[str, Any]](), list[str]()

    def measure(self, made: Any, what: str) -> None:
        found = distance(self.first, made, self.windows)
        self.measures.append({"what": what, **asdict(found)})
        # After a prefix logits are others by intent: how far says nothing of a fault.
        largest = "" if self.prefixed else f", largest difference of a logit {found.largest:.2g}"
        self.lines.append(
            f"{what}: KL {found.divergence:z.4f} nats a token, perplexity "
            f"{found.perplexity_before:.2f} → {found.perplexity:.2f}{largest} "
            f"({found.tokens:,} tokens of {self.text})"
        )

    @property
    def relative(self) -> float:
        """The last distance of the logits over their length."""
        return float(self.measures[-1]["relative"])


def to_other_mechanisms(
    model: Any, tokenizer: Any, config: ConvertConfig, *, rounded: Callable[[Any], Any]
) -> Conversion:
    """The same weights under other mechanisms, with the distance from the first model.

    Of the windows of the calibration text half calibrate or judge prefixes; the other half measures
    the distance, unless there is a text of its own.

    Args:
        model: in float32, as within `in_float32`.
        rounded: gives the new model the first's 16 bits, where it has them.
    """
    settings = config.settings()
    changes, first = target(config.preset, settings), imported(model)
    check_baseline(config.preset, settings, first.config)
    length = min(config.length, model.config.max_position_embeddings)
    prefix, basis = None, config.basis
    text = config.text or config.calibrate or STDLIB
    if config.prefix not in (None, AUTO):
        prefix = given_prefix(config.prefix, tokenizer, first.config.vocab_size)
    if config.prefix is not None:
        tokens = SEARCHED if prefix is None else len(prefix.ids)
        check_prefix(first.config, changes, tokens)
        changes |= {"normalizer": "key-value", "prefix_length": tokens}
    check_rotation(first.config, basis)
    added = _checked(config, first, changes, length)  # before the minutes of the next two steps
    calibrating, windows = _texts(config, text, tokenizer, length)
    if config.prefix == AUTO:
        prefix = searched_prefix(first, tokenizer, calibrating)
        changes["prefix_length"] = len(prefix.ids)
    before = first
    if config.learn_rotation:
        terminal.say("learning a rotation of the residual stream: a minute at a width of 576")
    if basis:
        turned = rotated(first, basis, seed=config.seed, learn=config.learn_rotation)
        before = with_equal_logits(first, turned)
        del turned
    start = started(before, changes)
    made = start.model
    if prefix is not None:
        fill(made, before, torch.tensor([prefix.ids]))
        before = first
    if config.equalise:
        made = with_equal_logits(made, equalised(made))
        start = start._replace(model=made)
    length = min(length, longest_text(made) or length)  # learned keys may have taken positions
    windows = [window[:length] for window in windows]
    distances = _Distances(first, windows, text, prefix is not None)
    with within_memory(f"give a smaller --length than {length}"):
        if prefix is None:
            _calibrate(config, made, before, calibrating, added, distances)
        else:
            check_after(made, first, prefix)
            distances.measure(made, "with the prefix, against the model without it")
        same_in_float32 = distances.relative <= TOLERANCE
        made = rounded(made)
        narrow = dtype_name(made) if made.dtype.itemsize == 2 else None
        with in_float32(made):
            if narrow is not None:
                distances.measure(made, f"rounded to {narrow}")
            after = 0.0 if prefix is None else difference_after(made, first, prefix.ids)
            few = windows[:WINDOWS]
            numbers = {"before": three_numbers(first, few), "after": three_numbers(made, few)}
    said = in_three_lines(**numbers, text=f"{sum(map(len, few)):,} tokens of {text}")
    lines = [*distances.lines, *said, *start.in_words()]
    if prefix is not None:
        lines.insert(0, _prefix_line(prefix, made, after))
    record = {
        **_record(config.model, model, made),
        "changes": changes,
        "rotated": basis,
        "seed": config.seed if basis else None,
        "learned_rotation": config.learn_rotation,
        "equalised": config.equalise,
        "same_in_float32": same_in_float32,
        "same_function": distances.relative <= TOLERANCE,
        "relative": distances.relative,
        "new": start.new,
        "dropped": start.dropped,
        "measures": distances.measures,
        "repaired": numbers,
        "text": text,
        "calibration": config.calibrate,
        "length": length,
        "windows": len(windows),
        "prefix": None if prefix is None else {**asdict(prefix), "relative": after},
    }
    return Conversion(model=made, lines=lines, record=record)


def _checked(
    config: ConvertConfig, first: ClearheadForCausalLM, changes: dict[str, Any], length: int
) -> tuple[int, ...]:
    """The layers that get a learned sink, after what cannot be converted so is refused."""
    with torch.device("meta"):
        outline = ClearheadForCausalLM(changed(first.config, changes))
    if config.equalise:
        check_equalised(outline)
    added = added_sinks(first.config, outline.config)
    if config.sink_logit is not None and not added:
        raise ClearheadError(
            "--sink-logit is for the sinks that --to sink or normalizer=sink adds, and has no "
            "effect without: a model keeps its own"
        )
    if config.calibrate is None or config.prefix is not None:
        return added
    if not _has_keys(outline):
        check_sinks(outline.config, added)
    elif _has_keys(first):
        raise ClearheadError(
            "--calibrate would replace the keys and values that this model has: give --text "
            "to measure on, or convert the model that it was made from"
        )
    elif (places := outline.config.prefix_length) >= length:
        raise ClearheadError(
            f"prefix_length={places} takes the first tokens of longer windows than --length "
            f"{length}: give --length {places + 1} or more"
        )
    return added


def _texts(
    config: ConvertConfig, text: str, tokenizer: Any, length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to calibrate on and windows to measure on, int64 [length] each."""
    calibrating, windows, count = list[Tensor](), list[Tensor](), config.windows
    if config.calibrate is not None:
        twice: Literal[1, 2] = 1 if config.text else 2
        read = sample(config.calibrate, tokenizer, length=length, count=twice * count, least=twice)
        calibrating, windows = read[::twice], read[1::2]
    if not windows or config.text is not None:
        windows = sample(text, tokenizer, length=length, count=count)
    return calibrating, windows


def _calibrate(
    config: ConvertConfig,
    made: ClearheadForCausalLM,
    before: ClearheadForCausalLM,
    windows: list[Tensor],
    added: tuple[int, ...],
    distances: _Distances,
) -> None:
    """Set what the conversion adds: sinks, or learned keys and values; measured at each step."""
    blocks: Any = made.model.layers
    sinks = [blocks[index].self_attn.normalizer for index in added]
    if (logit := config.sink_logit) is not None:
        for sink in sinks:
            nn.init.constant_(sink.logit, logit)
    distances.measure(made, "start")
    if windows and _has_keys(made):
        fill(made, before, torch.stack(windows)[:, : made.config.prefix_length])
        distances.measure(made, "keys and values of first tokens")
    elif windows:
        calibrate(made, windows, added)
        distances.measure(made, "calibrated beside the first token")
    elif sinks and all(sink.rests for sink in sinks):
        distances.lines.append(f"{AT_REST}: give --calibrate TEXT, or --sink-logit 0 for softmax-1")


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
