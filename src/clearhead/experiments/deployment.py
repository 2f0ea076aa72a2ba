"""A model saved in few bits against the one in bfloat16: bytes, tokens a second, perplexity.

transformers takes torchao's tensors apart into plain ones and describes them in the header of a
safetensors file, so nothing is ever pickled.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data import prepare, windows
from clearhead.errors import ClearheadError, require
from clearhead.eval import perplexity
from clearhead.experiments.quantization import check_models
from clearhead.experiments.run_setup import load_model, refuse_tokenizer, text_of
from clearhead.experiments.sweep_configs import QuantizeConfig, short_names
from clearhead.experiments.timing import take_turns
from clearhead.models.inspection import (
    generating_plainly,
    longest_text,
    parameter_count,
    within_memory,
)
from clearhead.models.loading import pretrained, resolved, save_tokenizer, without_bars
from clearhead.quantize.linear import linear_layers
from clearhead.records import manifest
from clearhead.records.files import publish_folder, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.report import style
from clearhead.versions import versions

TOKENS, ROUNDS = 32, 5  # of a prompt and of what follows it; of timing
FIGURES = "quantization.json"  # in the model's folder


def run_deployment(
    config: QuantizeConfig, *, say: Callable[[str], None], show: Callable[[str], None]
) -> None:
    """Save models in few bits, load and measure them; each folder holds its figures.

    Raises:
        ClearheadError: options that have no effect, a model or a form that does not work; a saved
            model does not come back as it was.
    """
    refuse_tokenizer(config.data)
    idle = config.given("scheme", "seeds", "records", "page", "title")
    if not config.deploy or config.output is None or idle:
        raise ClearheadError(
            "a model to keep takes --deploy and --output"
            + (f"; {', '.join(idle)} would have no effect" if idle else "")
        )
    forms = list(dict.fromkeys(config.deploy))
    require_new(config.output)
    check_models(config)
    for source, name in zip(config.models, short_names(config.models), strict=True):
        peer, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
        corpus = prepare(text_of(config.data, config.models), tokenizer=tokenizer, progress=say)
        count = max(1, config.tokens // config.length)
        texts = list(windows(corpus, length=config.length, count=count))
        load: dict[str, Any] = {"device_map": str(peer.device), "dtype": torch.bfloat16}
        load["trust_remote_code"] = config.trust_remote_code
        for form in forms:
            alone = len(config.models) == len(forms) == 1
            folder = config.output if alone else config.output / f"{name}-{form}"
            with within_memory("a model is held twice, whole and in few bits: free memory for it"):
                model, peer = deploy(peer, tokenizer, resolved(source), form, folder, load)
            say(f"{name}, {form}: saved; a new process loads the saved model")
            figures = {
                "form": form,
                "of": source,
                "class": type(peer).__name__,
                "parameters": parameter_count(peer),
                **measured(model, peer, folder, texts, load),
                **provenance(peer.device),
                "versions": versions("torchao"),
            }
            write_json(folder / FIGURES, figures)
            manifest.seal(folder)
            bits, full = (in_words(figures, side) for side in ("", "bfloat16_"))
            show(f"{name}, {form}: {bits}; in bfloat16 {full}")
            show(f"saved: {folder}; loaded and run by a new process")


def in_words(figures: dict[str, Any], side: str) -> str:
    """Bytes, speed and perplexity of a side, "" or "bfloat16_"."""
    size, speed, perplexity = (
        figures[f"{side}{name}"] for name in ("bytes", "tokens_per_second", "perplexity")
    )
    return f"{size:,} bytes, {style.number(speed)} tokens/s, perplexity {perplexity:.2f}"


def deploy(
    peer: Any, tokenizer: Any, source: str, form: str, folder: Path, load: dict[str, Any]
) -> tuple[Any, Any]:
    """Save the model `peer` at `source` in few bits to a new folder; `load` is for from_pretrained.

    Returns:
        The saved model, and that of `source`, both loaded anew.

    Raises:
        ClearheadError: torchao is not installed, or refuses the model; the model has no
            `nn.Linear`, or is quantised already; the folder exists.
    """
    torchao = require("torchao", "torchao").quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    dynamic = torchao.Int8DynamicActivationInt8WeightConfig
    by_tensor = [torchao.PerTensor(), torchao.PerRow()]
    config = {
        "int8-weight-only": torchao.Int8WeightOnlyConfig,
        "int8-dynamic": dynamic,
        "int8-dynamic-tensor": lambda: dynamic(granularity=by_tensor),
    }[form]()
    require_new(folder)
    if not any(isinstance(layer, nn.Linear) for layer in linear_layers(peer).values()):
        raise ClearheadError(f"{type(peer).__name__} has no nn.Linear: torchao quantises nothing")
    head = peer.get_output_embeddings()
    kept = [name for name, module in peer.named_modules() if module is head]
    few = TorchAoConfig(config, modules_to_not_convert=kept)
    try:
        made = pretrained(AutoModelForCausalLM, source, quantization_config=few, **load)
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
        raise ClearheadError(f"torchao cannot make {form} of {source}: {error}") from error
    with publish_folder(folder) as temporary, without_bars():
        made.save_pretrained(temporary)
        save_tokenizer(tokenizer, temporary)
    del made
    model, peer = (pretrained(AutoModelForCausalLM, one, **load).eval() for one in (folder, source))
    return model, peer


def measured(
    model: Any, peer: Any, folder: Path, texts: list[Tensor], load: dict[str, Any]
) -> dict[str, Any]:
    """Bytes, tokens a second (in turns, one text at a time) and perplexity of both models.

    Raises:
        ClearheadError: a process of its own, which loads the folder, goes on from a prompt with
            other tokens than this one's model; no perplexity.
    """
    tokens = min(TOKENS, (longest_text(peer) or 2 * TOKENS) // 2)
    ids, length = texts[0][:tokens].tolist(), len(texts[0])
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        if pool.submit(_elsewhere, folder, ids, tokens, load).result() != continuation(
            model, ids, tokens
        ):
            raise ClearheadError(
                f"{folder} was saved, but a new process continues the text otherwise than this "
                "one: do not use it"
            )
    sides = {"": model, "bfloat16_": peer}
    turns = {side: lambda one=one: continuation(one, ids, tokens) for side, one in sides.items()}
    seconds = take_turns(turns, ROUNDS)
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in peer.state_dict().values()}
    figures: dict[str, Any] = {"length": length, "tokens": len(texts) * length}
    figures["bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    figures["bfloat16_bytes"] = sum(stored.values())
    for side, one in sides.items():
        with within_memory(f"give a smaller --length than {length}"):
            found = perplexity(one, texts, length=length, batch_size=1)
        if found.problem:
            raise ClearheadError(f"no perplexity: {found.problem}")
        figures[f"{side}perplexity"] = found.perplexity
        figures[f"{side}tokens_per_second"] = tokens / median(seconds[side])
    return figures


def continuation(model: Any, ids: list[int], tokens: int) -> list[int]:
    """The `tokens` likeliest tokens after `ids`, one after the other, past any end of text."""
    prompt = torch.tensor([ids], device=model.device)
    count = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        out: Tensor = generating_plainly(model).generate(prompt, **options, **count)
    return [int(token) for token in out[0, len(ids) :]]


def _elsewhere(folder: Path, ids: list[int], tokens: int, load: dict[str, Any]) -> list[int]:
    from transformers import AutoModelForCausalLM

    import clearhead.models  # registers our model type  # noqa: F401
    from clearhead import extensions

    extensions.load()
    return continuation(pretrained(AutoModelForCausalLM, folder, **load).eval(), ids, tokens)
