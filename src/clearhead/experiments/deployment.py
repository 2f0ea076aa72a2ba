"""A model saved in few bits against the one in bfloat16: bytes, tokens a second, perplexity."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from clearhead.data import prepare, windows
from clearhead.errors import ClearheadError, require_extras
from clearhead.eval import perplexity
from clearhead.experiments.run_setup import load_model, refuse_tokenizer, text_of
from clearhead.experiments.sweep_configs import QuantizeConfig, short_names
from clearhead.experiments.timing import take_turns
from clearhead.models.inspection import longest_text, parameter_count, within_memory
from clearhead.models.loading import resolved
from clearhead.quantize.deploy import (
    INT4_INPUTS,
    Deployed,
    continuation,
    continued_elsewhere,
    deploy,
)
from clearhead.records import manifest
from clearhead.records.files import require_new, write_json
from clearhead.records.provenance import KEYS, provenance
from clearhead.records.runs import QUANTIZATION, Line
from clearhead.versions import versions

PROMPT, TOKENS, ROUNDS = 32, 32, 5
_SIDES = ("perplexity", "bytes", "tokens_per_second")
_RUN = {"kind": "run", "dtype": "bfloat16"}
_HEADER = ("class", "parameters", "quantized_parameters", "length", "tokens", *KEYS)
FIGURES = "quantization.json"  # in the model's folder


def run_deployment(
    config: QuantizeConfig, *, say: Callable[[str], None]
) -> dict[Path, dict[str, Any]]:
    """Save models in few bits, load and measure them; return each folder's figures, which it holds.

    Raises:
        ClearheadError: options that have no effect, a model or a form that does not work; a saved
            model does not come back as it was.
    """
    refuse_tokenizer(config.data)
    idle = config.given("scheme", "seeds", "records")
    if not config.deploy or config.output is None or idle:
        raise ClearheadError(
            "a model to keep takes --deploy and --output"
            + (f"; {', '.join(idle)} would have no effect" if idle else "")
        )
    require_extras(config)
    forms = list(dict.fromkeys(config.deploy))
    alone = len(config.models) == len(forms) == 1
    require_new(config.output)
    deployed: dict[Path, dict[str, Any]] = {}
    for source, name in zip(config.models, short_names(config.models), strict=True):
        peer, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
        text = text_of(config.data, config.models)
        corpus = prepare(text, tokenizer=tokenizer, progress=say)
        count = max(1, config.tokens // config.length)
        read = list(windows(corpus, length=config.length, count=count))
        for form in forms:
            folder = config.output if alone else config.output / f"{name}-{form}"
            with within_memory("a model is held twice, whole and in few bits: free memory for it"):
                made = deploy(
                    peer,
                    tokenizer,
                    resolved(source),
                    form,
                    folder,
                    trust_remote_code=config.trust_remote_code,
                )
            say(f"{name}, {form}: saved")
            found = {"form": form, "of": source, **figures(made, folder, read, progress=say)}
            write_json(folder / FIGURES, found)
            manifest.seal(folder)
            deployed[folder] = {"name": name, **found}
    return deployed


def records_of(deployed: Mapping[Path, dict[str, Any]]) -> list[Line]:
    """The figures as records of a quantisation, whose full precision is bfloat16."""
    lines: list[Line] = []
    for found in deployed.values():
        where = {"kind": "measure", "run": found["name"]}
        if not any(line["run"] == found["name"] for line in lines):
            header = {key: found[key] for key in _HEADER if key in found}
            lines.append({"study": QUANTIZATION, "path": found["of"], **header, **where} | _RUN)
            lines += [{**where, "metric": key, "value": found[f"bfloat16_{key}"]} for key in _SIDES]
        where |= {"scheme": found["form"]}
        lines += [{**where, "metric": key, "value": found[key]} for key in _SIDES]
    return lines


def figures(
    deployed: Deployed, folder: Path, texts: Sequence[Tensor], *, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Size, speed and perplexity of both models, ready for JSON.

    A process of its own loads the folder and must go on from a prompt with the very tokens that
    this one's model finds. Then both models generate in turns, one text at a time, in one process.

    Raises:
        ClearheadError: the saved model does not come back as it was.
    """
    limit = longest_text(deployed.model)
    if limit is not None and limit <= TOKENS:
        raise ClearheadError(f"{folder} was saved, but {limit} positions are too few to time it")
    ids = texts[0][: PROMPT if limit is None else min(PROMPT, limit - TOKENS)].tolist()
    progress("a new process loads the saved model")
    here = continuation(deployed.model, ids, TOKENS)
    there = continued_elsewhere(
        folder, ids, TOKENS, str(deployed.model.device), deployed.trust_remote_code
    )
    if here != there:
        raise ClearheadError(
            f"{folder} was saved, but a new process continues the text otherwise than this one: "
            "do not use it"
        )
    progress(f"both generate {TOKENS} tokens, {ROUNDS} times in turns")
    seconds = take_turns(
        {
            "ours": lambda: continuation(deployed.model, ids, TOKENS),
            "bfloat16": lambda: continuation(deployed.peer, ids, TOKENS),
        },
        ROUNDS,
    )
    ours, peer = (TOKENS / median(seconds[side]) for side in ("ours", "bfloat16"))
    progress("perplexity of both")
    length = len(texts[0])
    with within_memory(f"give a smaller --length than {length}"):
        found, full = (
            perplexity(model, texts, length=length, batch_size=1)
            for model in (deployed.model, deployed.peer)
        )
    if problem := found.problem or full.problem:
        raise ClearheadError(f"no perplexity: {problem}")
    layers = [deployed.peer.get_submodule(name) for name in deployed.layers]
    return {
        "class": type(deployed.peer).__name__,
        "parameters": parameter_count(deployed.peer),
        "bytes": deployed.bytes,
        "bfloat16_bytes": deployed.peer_bytes,
        "tokens_per_second": ours,
        "bfloat16_tokens_per_second": peer,
        "perplexity": found.perplexity,
        "bfloat16_perplexity": full.perplexity,
        "length": length,
        "tokens": len(texts) * length,
        "quantized_layers": len(layers),
        "quantized_parameters": sum(layer.weight.numel() for layer in layers),
        "narrowest_input": min(layer.in_features for layer in layers),
        "other_linear_layers": list(deployed.others),
        **provenance(deployed.model.device),
        "versions": versions("torchao"),
    }


def not_smaller(found: dict[str, Any]) -> str | None:
    """Why the saved model of these `figures` is no smaller than in bfloat16, and what would be.

    Returns:
        One line, or None where it is smaller.
    """
    if found["bytes"] < found["bfloat16_bytes"]:
        return None
    narrow = found["narrowest_input"]
    if found["form"] == "int4-weight-only" and narrow < INT4_INPUTS:
        return (
            f"not smaller than in bfloat16: int4 pads every layer's inputs to a multiple of "
            f"{INT4_INPUTS:,}, and here some have {narrow}; int8-weight-only pads nothing, and a "
            f"model at least {INT4_INPUTS:,} wide gains by int4"
        )
    return (
        f"not smaller than in bfloat16: with inputs as few as {narrow}, what describes the "
        "quantised layers in the file takes more than their weights save; a wider model gains"
    )
