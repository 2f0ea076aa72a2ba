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
    check_prefix,
    difference_after,
    fill,
    given_prefix,
    searched_prefix,
)
from clearhead.experiments.repaired import WINDOWS, in_three_lines, three_numbers
from clearhead.experiments.run_setup import load_model, require_own_tokenizer
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
from clearhead.models.language_models import ClearheadForCausalLM
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
    config.settings()  # refuses words of another form
    require_new(config.output)
    earlier = _of_the_source(config.model)
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


class _Course:
    """A conversion to other mechanisms under way; its steps in their order.

    Of the windows of the calibration text half calibrate or judge prefixes; the other half measures
    the distance, unless there is a text of its own.
    """

    def __init__(self, model: Any, tokenizer: Any, config: ConvertConfig) -> None:
        settings = config.settings()
        self.config, self.tokenizer = config, tokenizer
        self.changes, self.first = target(config.preset, settings), imported(model)
        check_baseline(config.preset, settings, self.first.config)
        self.length = min(config.length, model.config.max_position_embeddings)
        self.basis: list[Part] = [part for part in config.rotate if part != "down"]
        self.text = config.text or config.calibrate or STDLIB
        self.prefix: Prefix | None = None
        self.after = 0.0  # how far logits after the prefix are from the first model's
        self.calibrating, self.windows = list[Tensor](), list[Tensor]()  # int64 [length] each
        self.measures, self.lines = list[dict[str, Any]](), list[str]()

    def check(self) -> None:
        """Refuse what can be refused, before the minutes of the next two steps."""
        config, ours = self.config, self.first.config
        if config.prefix not in (None, AUTO):
            self.prefix = given_prefix(config.prefix, self.tokenizer, ours.vocab_size)
        if config.prefix is not None:
            tokens = SEARCHED if self.prefix is None else len(self.prefix.ids)
            check_prefix(ours, self.changes, tokens)
            self.changes |= {"normalizer": "key-value", "prefix_length": tokens}
        check_rotation(ours, self.basis)
        with torch.device("meta"):
            outline = ClearheadForCausalLM(changed(ours, self.changes))
        if config.equalise:
            check_equalised(outline)
        self.added = added_sinks(ours, outline.config)
        if config.sink_logit is not None and not self.added:
            raise ClearheadError(
                "--sink-logit is for the sinks that --to sink or normalizer=sink adds, and has no "
                "effect without: a model keeps its own"
            )
        if config.calibrate is None or config.prefix is not None:
            return
        if not _has_keys(outline):
            check_sinks(ours, outline.config)
        elif _has_keys(self.first):
            raise ClearheadError(
                "--calibrate would replace the keys and values that this model has: give --text "
                "to measure on, or convert the model that it was made from"
            )
        elif (places := outline.config.prefix_length) >= self.length:
            raise ClearheadError(
                f"prefix_length={places} takes the first tokens of longer windows than --length "
                f"{self.length}: give --length {places + 1} or more"
            )

    def read(self) -> None:
        config, count = self.config, self.config.windows
        if config.calibrate is not None:
            twice: Literal[1, 2] = 1 if config.text else 2
            options: Any = {"length": self.length, "count": twice * count, "least": twice}
            read = sample(config.calibrate, self.tokenizer, **options)
            self.calibrating, self.windows = read[::twice], read[1::2]
        if not self.windows or config.text is not None:
            self.windows = sample(self.text, self.tokenizer, length=self.length, count=count)
        if config.prefix == AUTO:
            self.prefix = searched_prefix(self.first, self.tokenizer, self.calibrating)
            self.changes["prefix_length"] = len(self.prefix.ids)

    def turn(self) -> None:
        config, self.before = self.config, self.first
        if config.learn_rotation:
            terminal.say("learning a rotation of the residual stream: a minute at a width of 576")
        if self.basis:
            turned = rotated(self.first, self.basis, seed=config.seed, learn=config.learn_rotation)
            self.before = with_equal_logits(self.first, turned)

    def start(self) -> None:
        self.begun = started(self.before, self.changes)
        self.made = self.begun.model
        if self.prefix is not None:
            fill(self.made, self.before, torch.tensor([self.prefix.ids]))
            self.before = self.first  # whose memory is not one more model's
        if self.config.equalise:
            self.made = with_equal_logits(self.made, equalised(self.made))
            self.begun = self.begun._replace(model=self.made)
        # Learned keys may have taken positions.
        self.length = min(self.length, longest_text(self.made) or self.length)
        self.windows = [window[: self.length] for window in self.windows]
        layers: Any = self.made.model.layers
        self.sinks = [layers[index].self_attn.normalizer for index in self.added]
        if (logit := self.config.sink_logit) is not None:
            for sink in self.sinks:
                nn.init.constant_(sink.logit, logit)

    def fill(self) -> None:
        if self.prefix is not None:
            self.after = difference_after(self.made, self.first, self.prefix.ids)
            if not self.after <= TOLERANCE:
                raise ClearheadError(
                    f"the model with a prefix gives other logits than the one after it, by "
                    f"{self.after:.2g} of their size: convert --to a mechanism of another function "
                    "first, then the result with --prefix"
                )
            return self._measure("with the prefix, against the model without it")
        self._measure("start")
        if self.calibrating and _has_keys(self.made):
            first_tokens = torch.stack(self.calibrating)[:, : self.made.config.prefix_length]
            fill(self.made, self.before, first_tokens)
            self._measure("keys and values of first tokens")
        elif self.calibrating:
            calibrate(self.made, self.calibrating, self.added)
            self._measure("calibrated beside the first token")
        elif self.added and all(sink.rests for sink in self.sinks):
            self.lines.append(f"{AT_REST}: give --calibrate TEXT, or --sink-logit 0 for softmax-1")

    def round(self, rounded: Callable[[Any], Any]) -> None:
        """Give the model the first's 16 bits, where it has them."""
        self.made = rounded(self.made)
        if self.made.dtype.itemsize == 2:
            what = f"rounded to {dtype_name(self.made)}"
            with in_float32(self.made):
                self._measure(what)
                if self.prefix is not None:
                    self.after = difference_after(self.made, self.first, self.prefix.ids)

    def compare(self) -> None:
        """Add what the repair changed of sink, largest state and 8 bits."""
        windows, less = self.windows[:WINDOWS], f"give a smaller --length than {self.length}"
        with in_float32(self.made), within_memory(less):
            before, after = (three_numbers(model, windows) for model in (self.first, self.made))
        text = f"{sum(map(len, windows)):,} tokens of {self.text}"
        self.numbers = {"before": before, "after": after}
        self.lines += in_three_lines(before, after, text)

    def _measure(self, what: str) -> None:
        with within_memory(f"give a smaller --length than {self.length}"):
            found = distance(self.first, self.made, self.windows)
        self.relative = found.relative
        self.measures.append({"what": what, **asdict(found)})
        # After a prefix logits are others by intent: how far says nothing of a fault.
        largest = "" if self.prefix else f", largest difference of a logit {found.largest:.2g}"
        self.lines.append(
            f"{what}: KL {found.divergence:z.4f} nats a token, perplexity "
            f"{found.perplexity_before:.2f} → {found.perplexity:.2f}{largest} "
            f"({found.tokens:,} tokens of {self.text})"
        )


def to_other_mechanisms(
    model: Any, tokenizer: Any, config: ConvertConfig, *, rounded: Callable[[Any], Any]
) -> Conversion:
    """The same weights under other mechanisms, with the distance from the first model.

    Args:
        model: in float32, as within `in_float32`.
        rounded: gives the new model the first's 16 bits, where it has them.
    """
    course = _Course(model, tokenizer, config)
    course.check()
    course.read()
    course.turn()
    course.start()
    course.fill()
    same_in_float32 = course.relative <= TOLERANCE
    course.round(rounded)
    course.compare()
    prefix, lines = course.prefix, course.lines + course.begun.in_words()
    return Conversion(
        model=course.made,
        lines=lines
        if prefix is None
        else [_prefix_line(prefix, course.made, course.after), *lines],
        record={
            **_record(config.model, model, course.made),
            "changes": course.changes,
            "rotated": course.basis,
            "seed": config.seed if course.basis else None,
            "learned_rotation": config.learn_rotation,
            "equalised": config.equalise,
            "same_in_float32": same_in_float32,
            "same_function": course.relative <= TOLERANCE,
            "relative": course.relative,
            "new": course.begun.new,
            "dropped": course.begun.dropped,
            "measures": course.measures,
            "repaired": course.numbers,
            "text": course.text,
            "calibration": config.calibrate,
            "length": course.length,
            "windows": len(course.windows),
            "prefix": None if prefix is None else {**asdict(prefix), "relative": course.after},
        },
    )


def _of_the_source(model: str) -> dict[str, Any] | None:
    """The record of the conversion that made the source, with its prefix."""
    path = Path(model) / RECORD
    return read_json(path, "delete it to convert without it") if path.is_file() else None


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
