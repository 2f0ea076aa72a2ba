"""Save a model in the format compressed-tensors, open it again, compare it with its simulation."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.data import prepare, windows
from clearhead.errors import ClearheadError
from clearhead.experiments.deployment import FIGURES
from clearhead.experiments.run_setup import load_model, refuse_tokenizer, text_of
from clearhead.experiments.sweep_configs import QuantizeConfig
from clearhead.models.inspection import generating_plainly, longest_text, parameter_count
from clearhead.models.loading import save_tokenizer, without_bars
from clearhead.quantize import Cost, Texts, cost, linear_layers, quantized, scheme
from clearhead.quantize.compressed import as_loaded, check_widths, compress, stated
from clearhead.quantize.measure import CALIBRATION
from clearhead.records import manifest
from clearhead.records.files import publish_folder, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.versions import versions

PROMPTS, TOKENS = 20, 16  # continued greedily; tokens of a prompt and of what follows it
FAR = 0.02  # of the perplexity: a saved model further from its simulation is another


def run_saving(
    config: QuantizeConfig, *, say: Callable[[str], None], show: Callable[[str], None]
) -> None:
    """Save a model under a scheme, open it by transformers and compare it with the simulation.

    Raises:
        ClearheadError: options that have no effect; a scheme or a model that the format cannot
            hold; a saved model that is not what was simulated.
    """
    refuse_tokenizer(config.data)
    if idle := config.given("deploy", "output", "seeds", "records", "page", "title"):
        raise ClearheadError(f"a model to save takes --scheme; {', '.join(idle)} has no effect")
    if len(config.models) != 1 or len(config.scheme) != 1 or not config.given("scheme"):
        raise ClearheadError(
            f"--save takes one model and one --scheme, such as w8a8-static; found "
            f"{len(config.models)} and {len(config.scheme) if config.given('scheme') else 'none'}"
        )
    how, folder = scheme(config.scheme[0]), config.save
    stated(how)  # refuses what the format cannot say
    assert folder is not None
    require_new(folder)
    source = config.models[0]
    model, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
    if model.config.model_type == "clearhead":
        raise ClearheadError(
            f"{source} is a model of clearhead's own, which no server loads: save what "
            f"`clearhead convert {source} FOLDER --for serving` makes"
        )
    check_widths(linear_layers(model), how)
    corpus = prepare(text_of(config.data, config.models), tokenizer=tokenizer, progress=say)
    cut = partial(windows, corpus, length=config.length)
    calibrated = how.activations is not None and how.activations.calibrated
    texts = Texts(
        windows=list(cut(count=max(1, config.tokens // config.length))),
        calibration=list(cut(split="train", count=CALIBRATION) if calibrated else ()),
    )
    tokens = min(TOKENS, (longest_text(model) or 2 * TOKENS) // 2)
    prompts = torch.stack(list(windows(corpus, length=tokens, count=PROMPTS, seed=1)))
    figures: dict[str, Any] = {"scheme": how.name, "of": source, "class": type(model).__name__}
    figures |= {"parameters": parameter_count(model), "length": config.length}
    figures["full_perplexity"] = _perplexity(cost(model, None, texts))
    figures["simulated_perplexity"] = _perplexity(cost(model, how, texts))
    with quantized(model, as_loaded(how), texts):
        predicted = _continued(model, prompts, tokens)
    with publish_folder(folder) as temporary, _quietly():
        compressor = compress(model, how, texts)
        model.save_pretrained(temporary)
        compressor.update_config(temporary)
        save_tokenizer(tokenizer, temporary)
    del model
    say(f"saved: {folder}; transformers loads it")
    with _quietly():
        model, _ = load_model(str(folder), trust_remote_code=config.trust_remote_code)
        figures |= _measured(model, texts, prompts, predicted)
    figures["bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    figures |= {**provenance(torch.device("cpu")), "versions": versions("compressed-tensors")}
    write_json(folder / FIGURES, figures)
    manifest.seal(folder)
    kinds = "saved", "simulated", "full"
    saved, simulated, full = (figures[f"{one}_perplexity"] for one in kinds)
    if abs(saved - simulated) > FAR * simulated:
        raise ClearheadError(
            f"{folder} was saved, but its perplexity is {saved:.2f} where {simulated:.2f} was "
            "simulated: do not use it"
        )
    costs = [f"{one / full - 1:+.2%}" for one in (saved, simulated)]
    show(
        f"{how.name}: {figures['bytes']:,} bytes; perplexity {saved:.2f} ({costs[0]}), simulated "
        f"{simulated:.2f} ({costs[1]}), in full precision {full:.2f}; "
        f"{figures['equal_continuations']} of {len(prompts)} prompts continued as simulated"
    )


def _perplexity(found: Cost) -> float:
    if found.perplexity is None:
        raise ClearheadError(f"no perplexity: {found.reason}")
    return found.perplexity


def _measured(model: Any, texts: Texts, prompts: Tensor, predicted: Tensor) -> dict[str, Any]:
    equal = (_continued(model, prompts, predicted.shape[1]) == predicted).all(1).sum()
    figures = {"prompts": len(prompts), "equal_continuations": int(equal)}
    return {"saved_perplexity": _perplexity(cost(model, None, texts)), **figures}


def _continued(model: Any, prompts_BT: Tensor, tokens: int) -> Tensor:
    """int64 [B, tokens]: the likeliest tokens after each prompt, past any end of text."""
    prompts_BT = prompts_BT.to(model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompts_BT), "do_sample": False}
    options |= {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    own = model.generation_config
    try:
        with torch.no_grad():
            out: Tensor = generating_plainly(model).generate(prompts_BT, **options)
    finally:
        model.generation_config = own
    return out[:, prompts_BT.shape[1] :].cpu()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the progress bars of compressed-tensors and transformers."""
    with without_bars(), redirect_stderr(io.StringIO()):
        yield
