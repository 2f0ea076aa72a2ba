"""Conversion of a model to another library's format or other mechanisms, with their distance."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.data.sources import STDLIB
from clearhead.diagnose import RowMeans
from clearhead.diagnose.hidden import ResidualStream
from clearhead.errors import ClearheadError
from clearhead.eval.sliding import distance
from clearhead.lab import prefixes
from clearhead.lab.prefixes import Prefix
from clearhead.lab.run_setup import load_model, require_own_tokenizer
from clearhead.lab.sweep_configs import AUTO, ConvertConfig
from clearhead.models import conversion
from clearhead.models.conversion import TOLERANCE, in_float32, with_equal_logits
from clearhead.models.inspection import dtype_name, longest_text, within_memory
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.loading import load_tokenizer, require_room
from clearhead.models.rotated import check_equalised, check_rotation, equalised, rotated
from clearhead.models.starts import Start, changed, check_baseline, started, target
from clearhead.nn.normalizers import AT_REST, KeyValue
from clearhead.probe import measure as measure_inside
from clearhead.probe.tiles import ByTile
from clearhead.quantize import Texts, cost, scheme
from clearhead.records import manifest
from clearhead.records.files import publish_folder, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.terminal import say
from clearhead.train.checkpoint import save_pretrained, whole

WINDOWS = 1  # of 512 tokens: enough to tell a price of 100 % from one of 1 %
EIGHT_BITS = "w8a8-coarse"
RECORD = "conversion.json"  # in the folder of the converted model


def run_conversion(config: ConvertConfig, **_: object) -> list[str]:
    """Convert a model and write it with its record; return lines about the change.

    Raises:
        ClearheadError: as the conversions below; for an output that exists, a tokenizer that is
            another model's, and a run's checkpoint that is to change too.
    """
    config.settings()  # refuses words of another form
    require_new(config.output)
    if (model := whole(folder := Path(config.model))) is not None:
        if config.changes or config.purpose:
            raise ClearheadError(
                "--to, --prefix, --rotate, --equalise and --for take a whole model, not a run's "
                "checkpoint: convert it without them first, then the result"
            )
        tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None
        _write(config.output, model, tokenizer, None)
        return [f"{type(model).__name__} of a checkpoint: {config.output}"]
    conversion.require_convertible(config.model, trust_remote_code=config.trust_remote_code)
    copies = 2.5 if config.equalise else 2  # half of a model is its MLPs' gated rows
    require_room(config.model, "convert", copies=copies, wide=True)
    model, tokenizer = load_model(config.model, trust_remote_code=config.trust_remote_code)
    require_own_tokenizer(config.model, model, tokenizer)
    if config.changes:
        with in_float32(model) as rounded:
            made, about, lines = to_other_mechanisms(model, tokenizer, config, rounded=rounded)
    else:
        made, about, lines = *to_the_other_format(model, config.purpose), list[str]()
    kinds = {"from": type(model).__name__, "to": type(made).__name__}
    record = {"kind": "conversion", "of": config.model, **kinds, **provenance(made.device), **about}
    _write(config.output, made, tokenizer, record)
    outcome = _outcome(record, dtype_name(model), dtype_name(made))
    return [*lines, f"{kinds['from']} → {kinds['to']}, {outcome}: {config.output}"]


def _write(output: Path, model: Any, tokenizer: Any, record: dict[str, Any] | None) -> None:
    with publish_folder(output) as folder:
        save_pretrained(model, tokenizer, folder)
        if record is not None:
            write_json(folder / RECORD, record)
        manifest.seal(folder)


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


def to_the_other_format(model: Any, purpose: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The model in another library's format, or in a server's; and how far its logits differ."""
    made = {
        None: conversion.converted,
        "serving": conversion.for_serving,
        "llama.cpp": conversion.for_llama_cpp,
    }[purpose](model)
    with in_float32(model), in_float32(made):
        relative = conversion.logit_difference(model, made)
    # Their float32 weights have been compared: what is left is what rounding does.
    same = relative <= TOLERANCE
    return made, {"same_in_float32": True, "same_function": same, "relative": relative}


def to_other_mechanisms(
    model: Any, tokenizer: Any, config: ConvertConfig, *, rounded: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any], list[str]]:
    """The same weights under other mechanisms, with the distance from the first model.

    Half of the calibration text's windows calibrate sinks or judge prefixes; the other half
    measures the distance, unless another text is given for that.

    Args:
        model: in float32, as within `in_float32`.
        rounded: casts the new model to the first's 16-bit dtype, if it has one.

    Returns:
        The converted model, what a record says of it, and lines about the change.
    """
    first, text = conversion.imported(model), config.text or config.calibrate or STDLIB
    length = min(config.length, model.config.max_position_embeddings)
    changes, prefix, added = _planned(first, tokenizer, config)  # before minutes of work
    calibrating, windows = _texts(config, text, tokenizer, length)
    if config.prefix == AUTO:
        prefix = prefixes.searched_prefix(first, tokenizer, calibrating)
        changes["prefix_length"] = len(prefix.ids)
    start, before = _changed(first, changes, prefix, config)
    made = start.model
    length = min(length, longest_text(made) or length)  # learned keys may have taken positions
    windows = [window[:length] for window in windows]
    measures, few, after = list[dict[str, Any]](), windows[:WINDOWS], 0.0

    def measure(step: str) -> bool:
        """Measure the distance from the first model; True if it is zero."""
        measures.append({"what": step, **distance(first, made, windows)})
        return float(measures[-1]["relative"]) <= TOLERANCE

    with within_memory(f"give a smaller --length than {length}"):
        if prefix is None:
            steps = _calibrated(config, made, before, calibrating, added)
            same_in_float32 = [measure(step) for step in steps][-1]
        elif (apart := prefixes.difference_after(made, first, prefix.ids)) <= TOLERANCE:
            same_in_float32 = measure("with the prefix, against the model without it")
        else:
            raise ClearheadError(
                f"the model with a prefix gives other logits than the one after it, by {apart:.2g} "
                "of their size: convert --to a mechanism of another function first, then the "
                "result with --prefix"
            )
        same, made = same_in_float32, rounded(made)
        narrow = dtype_name(made) if made.dtype.itemsize == 2 else None
        with in_float32(made):
            if narrow is not None:
                same = measure(f"rounded to {narrow}")
            if prefix is not None:
                after = prefixes.difference_after(made, first, prefix.ids)
            numbers = {"before": three_numbers(first, few), "after": three_numbers(made, few)}
    lines = [] if prefix is None else [_prefix_line(prefix, made, after)]
    lines += [_in_words(one, text, prefix is not None) for one in measures]
    if added and not calibrating and all(sink.rests for sink in _sinks(made, added)):
        lines.append(f"{AT_REST}: give --calibrate TEXT, or --sink-logit 0 for softmax-1")
    lines += in_three_lines(**numbers, text=f"{sum(map(len, few)):,} tokens of {text}")
    about = {
        "changes": changes,
        "rotated": config.basis,
        "seed": config.seed if config.basis else None,
        "learned_rotation": config.learn_rotation,
        "equalised": config.equalise,
        "same_in_float32": same_in_float32,
        "same_function": same,
        "relative": measures[-1]["relative"],
        "new": start.new,
        "dropped": start.dropped,
        "measures": measures,
        "repaired": numbers,
        "text": text,
        "calibration": config.calibrate,
        "length": length,
        "windows": len(windows),
        "prefix": None if prefix is None else {**asdict(prefix), "relative": after},
    }
    return made, about, [*lines, *start.in_words()]


def _planned(
    first: ClearheadForCausalLM, tokenizer: Any, config: ConvertConfig
) -> tuple[dict[str, Any], Prefix | None, tuple[int, ...]]:
    """The changes of the configuration, a given prefix, and the layers that get a learned sink;
    refuses what cannot be converted so."""
    settings, prefix = config.settings(), None
    changes = target(config.preset, settings)
    check_baseline(config.preset, settings, first.config)
    if config.prefix not in (None, AUTO):
        prefix = prefixes.given_prefix(config.prefix, tokenizer, first.config.vocab_size)
    if config.prefix is not None:
        tokens = prefixes.SEARCHED if prefix is None else len(prefix.ids)
        prefixes.check_prefix(first.config, changes, tokens)
        changes |= {"normalizer": "key-value", "prefix_length": tokens}
    check_rotation(first.config, config.basis)
    with torch.device("meta"):
        outline = ClearheadForCausalLM(changed(first.config, changes))
    if config.equalise:
        check_equalised(outline)
    # Sinks that the model has are trained: those that it gets are set.
    after = outline.config.layers()
    added = tuple(
        index
        for index, layer in enumerate(after)
        if layer.normalizer == "sink" != first.config.layer(index).normalizer
    )
    if config.sink_logit is not None and not added:
        raise ClearheadError(
            "--sink-logit is for the sinks that --to sink or normalizer=sink adds, and has no "
            "effect without: a model keeps its own"
        )
    if config.calibrate is None or config.prefix is not None:
        return changes, prefix, added
    if _has_keys(first) and _has_keys(outline):
        raise ClearheadError(
            "--calibrate would replace the keys and values that this model has: give --text "
            "to measure on, or convert the model that it was made from"
        )
    if not added and not _has_keys(outline):
        raise ClearheadError(
            "--calibrate sets the sinks that a conversion adds, and a model's own stay as they "
            "are: give --to sink, --to key-value or --prefix auto, or --text to measure on"
        )
    # Its maps reach attention in another order than their sinks.
    if any(after[index].maps == "differential" for index in added) and not _has_keys(outline):
        raise ClearheadError(
            "--calibrate is not for maps='differential': choose maps=single or differential-v2"
        )
    return changes, prefix, added


def _texts(
    config: ConvertConfig, text: str, tokenizer: Any, length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to calibrate on and windows to measure on, int64 [length] each."""
    calibrating, windows, count = list[Tensor](), list[Tensor](), config.windows
    if config.calibrate is not None:
        twice: Literal[1, 2] = 1 if config.text else 2
        read = prefixes.sample(
            config.calibrate, tokenizer, length=length, count=twice * count, least=twice
        )
        calibrating, windows = read[::twice], read[1::2]
    if not windows or config.text is not None:
        windows = prefixes.sample(text, tokenizer, length=length, count=count)
    return calibrating, windows


def _changed(
    first: ClearheadForCausalLM,
    changes: dict[str, Any],
    prefix: Prefix | None,
    config: ConvertConfig,
) -> tuple[Start, ClearheadForCausalLM]:
    """The model with other mechanisms, and the one whose keys calibrate it."""
    before = first
    if config.learn_rotation:
        say("learning a rotation of the residual stream: a minute at a width of 576")
    if config.basis:
        rotation: Any = {"seed": config.seed, "learn": config.learn_rotation}
        before = with_equal_logits(first, rotated(first, config.basis, **rotation))
    start = started(before, changes)
    if prefix is not None:
        prefixes.fill(start.model, before, torch.tensor([prefix.ids]))
        before = first  # the rotated one would be another model's memory
    if config.equalise:
        start = start._replace(model=with_equal_logits(start.model, equalised(start.model)))
    return start, before


def _calibrated(
    config: ConvertConfig,
    made: ClearheadForCausalLM,
    before: ClearheadForCausalLM,
    windows: list[Tensor],
    added: tuple[int, ...],
) -> Iterator[str]:
    """Set what the conversion adds, sinks or learned keys and values; yield each step's name."""
    if config.sink_logit is not None:
        for sink in _sinks(made, added):
            nn.init.constant_(sink.logit, config.sink_logit)
    yield "start"
    if windows and _has_keys(made):
        prefixes.fill(made, before, torch.stack(windows)[:, : made.config.prefix_length])
        yield "keys and values of first tokens"
    elif windows:
        prefixes.calibrate(made, windows, added)
        yield "calibrated beside the first token"


def _sinks(model: Any, layers: tuple[int, ...]) -> list[Any]:
    return [model.model.layers[index].self_attn.normalizer for index in layers]


def _has_keys(model: ClearheadForCausalLM) -> bool:
    """True for learned keys and values."""
    return any(isinstance(module, KeyValue) for module in model.modules())


def _in_words(found: dict[str, Any], text: str, prefixed: bool) -> str:
    """The line of a distance on `text`; after a prefix logits differ by intent."""
    largest = "" if prefixed else f", largest difference of a logit {found['largest']:.2g}"
    return (
        f"{found['what']}: KL {found['divergence']:z.4f} nats a token, perplexity "
        f"{found['perplexity_before']:.2f} → {found['perplexity']:.2f}{largest} "
        f"({found['tokens']:,} tokens of {text})"
    )


def _prefix_line(prefix: Prefix, made: ClearheadForCausalLM, after: float) -> str:
    """The line that compares the logits with the first model's after the prefix."""
    narrow = f" as rounded to {dtype_name(made)}" if made.dtype.itemsize == 2 else ""
    line = (
        f"prefix {prefix.text!r}, {len(prefix.ids)} tokens: logits are those of the first model "
        f"after it, to {after:.1g} of their size{narrow}"
    )
    if (window := made.config.sliding_window) is not None:
        line += (
            f", within the sliding window of {window} tokens; beyond it every token still sees the "
            "prefix, and the first model's would not"
        )
    return line


def three_numbers(model: Any, windows: list[Tensor]) -> dict[str, float | None]:
    """A repair in three numbers, of a causal language model on int64 [T] windows of text; None
    where it has no such number.

    Returns:
        sink: the share of queries, over layers and heads, whose largest weight is on the first
            token; of the difference of maps, where a model has one.
        largest_state: the largest absolute hidden state, over their median.
        eight_bits: relative increase of perplexity under `w8a8-coarse`.
    """
    parts: Any = {"attention": [ByTile(weights=[RowMeans()])], "hidden": [ResidualStream()]}
    lines = measure_inside(model, windows, batch_size=1, **parts)
    whole = {(x["metric"], x.get("map")): x["value"] for x in lines if "layer" not in x}
    sinks = (whole.get(("first_token_argmax_share", map)) for map in ("difference", "softmax"))
    top, median = (whole.get((f"hidden_{one}", None), 0.0) for one in ("top_1", "median"))
    texts = Texts(windows=windows)
    full, rounded = (cost(model, how, texts).perplexity for how in (None, scheme(EIGHT_BITS)))
    return {
        "sink": next((one for one in sinks if one is not None), None),
        "largest_state": top / median if median > 0 else None,
        "eight_bits": rounded / full - 1 if rounded and full else None,
    }


def in_three_lines(
    before: dict[str, float | None], after: dict[str, float | None], text: str
) -> list[str]:
    """Before → after, for people; `text` names what was read."""
    lines = {
        "sink": ("sink: {} → {} of queries look most at the first token", "{:.1%}"),
        "largest_state": ("largest state: {} → {} times the median hidden state", "{:,.0f}"),
        "eight_bits": (f"8 bits: {{}} → {{}} perplexity with {EIGHT_BITS}", "{:+.1%}"),
    }
    return [
        line.format(*("not measured" if one is None else form.format(one) for one in pair))
        + f" ({text})"
        for key, (line, form) in lines.items()
        for pair in [(before[key], after[key])]
    ]
