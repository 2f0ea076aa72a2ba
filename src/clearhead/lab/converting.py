"""Conversion of a model to another library's format or other mechanisms, with their distance."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data.sources import STDLIB
from clearhead.diagnose import RowMeans
from clearhead.diagnose.hidden import ResidualStream
from clearhead.errors import ClearheadError
from clearhead.eval.sliding import distance
from clearhead.lab import prefixes
from clearhead.lab.prefixes import LONGEST, Prefix
from clearhead.lab.runs import load_model, require_own_tokenizer
from clearhead.lab.sweep_configs import AUTO, ConvertConfig
from clearhead.models import conversion
from clearhead.models.conversion import TOLERANCE, in_float32, logit_difference, with_equal_logits
from clearhead.models.inspection import check_tokens, dtype_name, longest_text, within_memory
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.loading import load_tokenizer, require_room
from clearhead.models.rotated import check_equalised, check_rotation, equalised, rotated
from clearhead.models.starts import Start, changed, check_baseline, started, target
from clearhead.nn.null_keys import AT_REST, KeyValue
from clearhead.probe import measure as measure_inside
from clearhead.probe.tiles import ByTile
from clearhead.quantize import Texts, cost, scheme
from clearhead.records import manifest
from clearhead.records.files import publish_folder, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.terminal import say
from clearhead.train.checkpoint import save_pretrained, whole

EIGHT_BITS = "w8a8-coarse"
RECORD = "conversion.json"  # in the folder of the converted model
# The three numbers of a repair, as lines for people.
_LINES = {
    "sink": ("sink: {} → {} of queries look most at the first token", "{:.1%}"),
    "largest_state": ("largest state: {} → {} times the median hidden state", "{:,.0f}"),
    "eight_bits": (f"8 bits: {{}} → {{}} perplexity with {EIGHT_BITS}", "{:+.1%}"),
}


def run_conversion(config: ConvertConfig, **_: object) -> list[str]:
    """Convert a model, or a run's checkpoint, to a new folder with its record; return lines."""
    config.settings()  # refuses words of another form
    require_new(config.output)
    if (model := whole(folder := Path(config.model))) is not None:
        if config.changes or config.purpose:
            raise ClearheadError("a run's checkpoint is not changed: convert it alone first")
        tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None
        _write(config.output, model, tokenizer, None)
        return [f"{type(model).__name__} of a checkpoint: {config.output}"]
    conversion.require_convertible(config.model, trust_remote_code=config.trust_remote_code)
    copies = 2.5 if config.equalise else 2  # half of a model is its MLPs' gated rows
    require_room(config.model, "convert", copies=copies, wide=True)
    model, tokenizer = load_model(config.model, trust_remote_code=config.trust_remote_code)
    require_own_tokenizer(config.model, model, tokenizer)
    if config.changes:
        new, about, lines = to_other_mechanisms(model, tokenizer, config)
    else:
        ways = {"serving": conversion.for_serving, "llama.cpp": conversion.for_llama_cpp}
        new, lines = ways.get(config.purpose or "", conversion.converted)(model), []
        with in_float32(model), in_float32(new):
            relative = logit_difference(model, new)
        # Their float32 weights have been compared: only rounding is left.
        same = {"same_in_float32": True, "same_function": relative <= TOLERANCE}
        about = {**same, "relative": relative}
    kinds = {"from": type(model).__name__, "to": type(new).__name__}
    record = {"kind": "conversion", "of": config.model, **kinds, **provenance(new.device), **about}
    _write(config.output, new, tokenizer, record)
    before, after = dtype_name(model), dtype_name(new)
    outcome = "with equal logits"
    if about.get("prefix"):  # compared before any rounding
        outcome = f"the same function after the prefix {about['prefix']['text']!r}"
    elif not about["same_in_float32"]:
        outcome = "another function, for clearhead train --from to go on with"
    elif not about["same_function"]:
        apart = f"{about['relative']:.1e} of their size"
        outcome += f" in float32; rounded to {after} they differ by {apart}"
    elif before != after:
        apart = f"more than {TOLERANCE:.0e} of their size"
        outcome += f", in {after}: {before} would move them by {apart}"
    return [*lines, f"{kinds['from']} → {kinds['to']}, {outcome}: {config.output}"]


def _write(output: Path, model: Any, tokenizer: Any, record: dict[str, Any] | None) -> None:
    with publish_folder(output) as folder:
        save_pretrained(model, tokenizer, folder)
        if record is not None:
            write_json(folder / RECORD, record)
        manifest.seal(folder)


def to_other_mechanisms(
    model: Any, tokenizer: Any, config: ConvertConfig
) -> tuple[Any, dict[str, Any], list[str]]:
    """The same weights under other mechanisms, a record of the distance from `model`, and lines.

    Half of the calibration text's windows calibrate sinks or judge prefixes; the other half
    measures the distance, unless another text is given for that.
    """
    with in_float32(model) as rounded:
        first, text = conversion.imported(model), config.text or config.calibrate or STDLIB
        length = min(config.length, model.config.max_position_embeddings)
        changes, prefix, added = _planned(first, tokenizer, config)  # before minutes of work
        calibrating, windows = _texts(config, text, tokenizer, length)
        if config.prefix == AUTO:
            prefix = prefixes.searched_prefix(first, tokenizer, calibrating)
            changes["prefix_length"] = len(prefix.ids)
        start, turned = _started(first, changes, prefix, config)
        new = start.model
        if config.sink_logit is not None:
            for sink in _sinks(new, added):
                nn.init.constant_(sink.logit, config.sink_logit)
        length = min(length, longest_text(new) or length)  # learned keys may have taken positions
        windows = [window[:length] for window in windows]
        short = windows[:1]  # enough to tell a price of 100 % from one of 1 %
        measures, apart = list[dict[str, Any]](), 0.0

        def measure(step: str) -> bool:
            """Measure the distance from the first model; True if it is zero."""
            measures.append({"what": step, **distance(first, new, windows)})
            return float(measures[-1]["relative"]) <= TOLERANCE

        with within_memory(f"give a smaller --length than {length}"):
            if prefix is not None:
                apart = logit_difference(first, new, prefix.ids)
                if not apart <= TOLERANCE:  # nor where it is no number
                    far = f"with the prefix logits differ by {apart:.2g} of their size"
                    then = "convert --to a mechanism of another function first, then --prefix"
                    raise ClearheadError(f"{far}: {then}")
                exact = measure("with the prefix, against the model without it")
            else:
                exact = measure("start")
                if calibrating and _has_keys(new):
                    ids_BT = torch.stack(calibrating)[:, : new.config.prefix_length]
                    prefixes.fill(new, turned, ids_BT)
                    exact = measure("keys and values of first tokens")
                elif calibrating:
                    prefixes.calibrate(new, calibrating, added)
                    exact = measure("calibrated beside the first token")
            same, new = exact, rounded(new)
            narrow = dtype_name(new) if new.dtype.itemsize == 2 else None
            with in_float32(new):
                if narrow is not None:
                    same = measure(f"rounded to {narrow}")
                if prefix is not None:
                    apart = logit_difference(first, new, prefix.ids)
                pair = {"before": first, "after": new}
                numbers = {side: three_numbers(one, short) for side, one in pair.items()}
    about = {
        "changes": changes,
        "rotated": config.basis,
        "seed": config.seed if config.basis else None,
        "learned_rotation": config.learn_rotation,
        "equalised": config.equalise,
        "same_in_float32": exact,
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
        "prefix": None if prefix is None else {**prefix._asdict(), "relative": apart},
    }
    lines = _in_words(about, new)
    if added and not calibrating and all(sink.rests for sink in _sinks(new, added)):
        lines.append(f"{AT_REST}: give --calibrate TEXT, or --sink-logit 0 for softmax-1")
    return new, about, [*lines, *start.in_words()]


def _started(
    first: ClearheadForCausalLM, changes: dict[str, Any], prefix: Prefix | None, config: Any
) -> tuple[Start, Any]:
    """The changed model, its sinks and keys not yet set from text, and the one to read that text:
    the first model, rotated where the result is."""
    turned = first
    if config.learn_rotation:
        say("learning a rotation of the residual stream: a minute at a width of 576")
    if config.basis:
        how: Any = {"seed": config.seed, "learn": config.learn_rotation}
        turned = with_equal_logits(first, rotated(first, config.basis, **how))
    start = started(turned, changes)
    if prefix is not None:
        prefixes.fill(start.model, turned, torch.tensor([prefix.ids]))
        turned = first  # the rotated one would be another model's memory
    if config.equalise:
        start = start._replace(model=with_equal_logits(start.model, equalised(start.model)))
    return start, turned


def _in_words(about: dict[str, Any], new: ClearheadForCausalLM) -> list[str]:
    """The distances, and the three numbers, which are of one window, as lines for people."""
    lines, prefix, text = list[str](), about["prefix"], about["text"]
    if prefix is not None:
        line = f"prefix {prefix['text']!r}, {len(prefix['ids'])} tokens: logits are those of the "
        line += f"first model after it, to {prefix['relative']:.1g} of their size"
        lines.append(line + f" as rounded to {dtype_name(new)}" * (new.dtype.itemsize == 2))
    for one in about["measures"]:  # after a prefix logits differ by intent
        largest = f", largest difference of a logit {one['largest']:.2g}" * (prefix is None)
        lines.append(
            f"{one['what']}: KL {one['divergence']:z.4f} nats a token, perplexity "
            f"{one['perplexity_before']:.2f} → {one['perplexity']:.2f}{largest} "
            f"({one['tokens']:,} tokens of {text})"
        )
    for key, (line, form) in _LINES.items():
        pair = (side[key] for side in about["repaired"].values())
        shown = ("not measured" if one is None else form.format(one) for one in pair)
        lines.append(line.format(*shown) + f" ({about['length']:,} tokens of {text})")
    return lines


def _planned(
    first: ClearheadForCausalLM, tokenizer: Any, config: ConvertConfig
) -> tuple[dict[str, Any], Prefix | None, tuple[int, ...]]:
    """The changes of the configuration, a given prefix, and the layers that get a learned sink;
    refuses what cannot be converted so."""
    settings, prefix = config.settings(), None
    changes = target(config.preset, settings)
    check_baseline(config.preset, settings, first.config)
    if config.prefix is not None:
        tokens = prefixes.SEARCHED
        if config.prefix != AUTO:
            words = config.prefix.replace(r"\n", "\n").replace(r"\t", "\t")
            ids = tokenizer(words, add_special_tokens=False).input_ids
            prefix, tokens = Prefix(tuple(ids), words), len(ids)
            if not 1 <= tokens <= LONGEST:
                raise ClearheadError(f"the prefix has {tokens:,} tokens: give 1 to {LONGEST}")
            check_tokens(first, torch.tensor(ids))
        normalizers = [layer.normalizer for layer in first.config.layers()]
        for one in (changes.get("normalizer", "softmax"), *normalizers):
            if one != "softmax":
                raise ClearheadError(f"--prefix is for normalizer='softmax', not {one!r}")
        longest = first.config.max_position_embeddings
        if tokens >= (room := min(longest, first.config.sliding_window or longest)):
            raise ClearheadError(f"a prefix of {tokens} tokens leaves no text in {room} positions")
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
    keys, calibrates = _has_keys(outline), config.calibrate is not None and config.prefix is None
    if calibrates and keys and _has_keys(first):
        raise ClearheadError("--calibrate would replace the keys and values of this model")
    if not added and (config.sink_logit is not None or (calibrates and not keys)):
        raise ClearheadError(
            "--sink-logit and --calibrate set sinks that --to adds: a model keeps its own"
        )
    # Its maps reach attention in another order than their sinks.
    if calibrates and not keys and any(after[index].maps == "differential" for index in added):
        raise ClearheadError("--calibrate is not for maps='differential'")
    return changes, prefix, added


def _texts(
    config: ConvertConfig, text: str, tokenizer: Any, length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to calibrate on and windows to measure on, int64 [length] each."""
    sample = partial(prefixes.sample, tokenizer=tokenizer, length=length)
    if config.calibrate is None:
        return [], sample(text, count=config.windows)
    if config.text is not None:
        return sample(config.calibrate, count=config.windows), sample(text, count=config.windows)
    both = sample(config.calibrate, count=2 * config.windows, least=2)
    return both[::2], both[1::2]


def _sinks(model: Any, layers: tuple[int, ...]) -> list[Any]:
    return [model.model.layers[index].self_attn.normalizer for index in layers]


def _has_keys(model: ClearheadForCausalLM) -> bool:
    """True for learned keys and values."""
    return any(isinstance(module, KeyValue) for module in model.modules())


def three_numbers(model: Any, windows: list[Tensor]) -> dict[str, float | None]:
    """A repair in three numbers on int64 [T] windows of text, None where there is none: the share
    of queries whose largest weight (of the difference of maps, if any) is on the first token; the
    largest absolute hidden state over their median; the relative rise of perplexity in 8 bits."""
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
