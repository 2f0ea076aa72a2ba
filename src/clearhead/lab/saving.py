"""Saving and measuring quantised models: for servers by compressed-tensors, or by torchao."""

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data import Corpus, prepare, windows
from clearhead.errors import ClearheadError, require
from clearhead.lab.measuring import check_models
from clearhead.lab.runs import load_model, text_of
from clearhead.lab.sweep_configs import QuantizeConfig, short_names
from clearhead.models import inspection
from clearhead.models.inspection import longest_text, parameter_count
from clearhead.models.loading import pretrained, resolved, without_bars
from clearhead.quantize import Scheme, Texts, cost, linear_layers, quantized, scheme
from clearhead.quantize.compressed import as_loaded, check_widths, compress, stated
from clearhead.quantize.linear import CALIBRATION
from clearhead.records import manifest
from clearhead.records.files import publish_folder, require_new, write_json
from clearhead.records.provenance import provenance
from clearhead.report import style
from clearhead.terminal import say, show
from clearhead.versions import versions

PROMPTS, TOKENS = 20, 16  # for servers: continued greedily; of a prompt and of what follows it
FAR = 0.02  # of the perplexity: a saved model further from its simulation is another
DEPLOYED = 32  # by torchao: tokens of a prompt, and of what follows it
UNTIMED, ROUNDS = 2, 5  # of timing: the first calls compile


def run_saving(config: QuantizeConfig) -> None:
    """Save a model under a scheme, open it by transformers and compare it with the simulation."""
    schemes = len(config.scheme) if config.given("scheme") else 0
    if (len(config.models), schemes) != (1, 1):
        counts = f"{len(config.models)} and {schemes or 'none'}"
        raise ClearheadError(f"--save takes one model and one --scheme; found {counts}")
    how, folder, (source,) = scheme(config.scheme[0]), config.save, config.models
    stated(how)  # refuses what the format cannot say
    assert folder is not None
    _check(config, folder, "deploy", "output", "seeds")
    model, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
    if model.config.model_type == "clearhead":
        converted = f"`clearhead convert {source} FOLDER --for serving` makes"
        raise ClearheadError(f"no server loads clearhead's own models: save what {converted}")
    check_widths(linear_layers(model), how)
    corpus, texts = _read(config, tokenizer)
    if how.calibrated:
        read = windows(corpus, length=config.length, split="train", count=CALIBRATION)
        texts = Texts(windows=texts.windows, calibration=list(read))
    tokens = min(TOKENS, (longest_text(model) or 2 * TOKENS) // 2)
    prompts = torch.stack(list(windows(corpus, length=tokens, count=PROMPTS, seed=1)))
    figures: dict[str, Any] = {"scheme": how.name, "of": source, "class": type(model).__name__}
    figures |= {"parameters": parameter_count(model), "length": config.length}
    figures["full_perplexity"] = full = _perplexity(model, texts)
    figures["simulated_perplexity"] = simulated = _perplexity(model, texts, how)
    with quantized(model, as_loaded(how), texts):
        predicted = continuations(model, prompts, tokens)
    with without_bars(), redirect_stderr(io.StringIO()):  # of compressed-tensors' bars
        with publish_folder(folder) as temporary:
            compressor = compress(model, how, texts)
            model.save_pretrained(temporary)
            compressor.update_config(temporary)
            tokenizer.save_pretrained(temporary)
        del model
        model, _ = load_model(str(folder), trust_remote_code=config.trust_remote_code)
        again = continuations(model, prompts, tokens)
        figures["saved_perplexity"] = saved = _perplexity(model, texts)
    equal = sum(a == b for a, b in zip(again, predicted, strict=True))
    figures |= {"prompts": len(prompts), "equal_continuations": equal}
    _seal(folder, figures, torch.device("cpu"), "compressed-tensors")
    if abs(saved - simulated) > FAR * simulated:
        result = f"perplexity is {saved:.2f} where {simulated:.2f} was simulated"
        raise ClearheadError(f"{folder} was saved, but its {result}: do not use it")
    show(
        f"{how.name}: {figures['bytes']:,} bytes; perplexity {saved:.2f} ({saved / full - 1:+.2%}),"
        f" simulated {simulated:.2f} ({simulated / full - 1:+.2%}), in full precision {full:.2f}; "
        f"{equal} of {len(prompts)} prompts continued as simulated"
    )


def run_deployment(config: QuantizeConfig) -> None:
    """Save models by torchao, load each again and measure it beside the one in bfloat16."""
    if config.deploy is None or config.output is None:
        raise ClearheadError("a model to keep takes --deploy and --output")
    _check(config, config.output, "scheme", "seeds")
    for source, name in zip(config.models, short_names(config.models), strict=True):
        folder = config.output
        if len(config.models) > 1:
            folder /= f"{name}-{config.deploy}"
        with inspection.within_memory("a model is held whole and in few bits: free memory"):
            texts, load = _deploy(source, folder, config)
            say(f"{name}, {config.deploy}: saved; the saved model is loaded")
            figures = _beside(folder, resolved(source), texts, load)
        about = {"form": config.deploy, "of": source, **figures}
        _seal(folder, about, torch.device(load["device_map"]), "torchao")
        bits, full = (
            f"{about[f'{side}bytes']:,} bytes, {style.number(about[f'{side}tokens_per_second'])} "
            f"tokens/s, perplexity {about[f'{side}perplexity']:.2f}"
            for side in ("", "bfloat16_")
        )
        show(f"{name}, {config.deploy}: {bits}; in bfloat16 {full}")
        show(f"saved, loaded again and run: {folder}")


def _deploy(source: str, folder: Path, config: QuantizeConfig) -> tuple[Texts, dict[str, Any]]:
    """Save a model in few bits; return windows to measure, and options of from_pretrained."""
    torchao = require("torchao", "torchao").quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    model, tokenizer = load_model(source, trust_remote_code=config.trust_remote_code)
    _, texts = _read(config, tokenizer)
    if not any(isinstance(layer, nn.Linear) for layer in linear_layers(model).values()):
        raise ClearheadError(f"{type(model).__name__} has no nn.Linear: torchao quantises nothing")
    load: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    load |= {"device_map": str(model.device), "dtype": torch.bfloat16}
    head = model.get_output_embeddings()
    whole = [name for name, module in model.named_modules() if module is head]
    del model
    by_tensor = [torchao.PerTensor(), torchao.PerRow()]
    few = torchao.Int8DynamicActivationInt8WeightConfig(granularity=by_tensor)
    few = TorchAoConfig(few, modules_to_not_convert=whole)
    try:
        model = pretrained(AutoModelForCausalLM, resolved(source), quantization_config=few, **load)
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
        raise ClearheadError(f"torchao cannot quantise {source}: {error}") from error
    with publish_folder(folder) as temporary, without_bars():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return texts, load


def _beside(folder: Path, source: str, texts: Texts, load: dict[str, Any]) -> dict[str, Any]:
    """Bytes, tokens a second and perplexity of the saved model, and of its source in bfloat16."""
    from transformers import AutoModelForCausalLM

    places: dict[str, str | Path] = {"": folder, "bfloat16_": source}
    sides = {side: pretrained(AutoModelForCausalLM, x, **load).eval() for side, x in places.items()}
    peer = sides["bfloat16_"]
    tokens = min(DEPLOYED, (longest_text(peer) or 2 * DEPLOYED) // 2)
    prompt = texts.windows[0][None, :tokens]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(UNTIMED + ROUNDS):
        for side, model in sides.items():
            started = time.perf_counter()
            continuations(model, prompt, tokens)
            seconds[side].append(time.perf_counter() - started)
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in peer.state_dict().values()}
    figures: dict[str, Any] = {"class": type(peer).__name__, "parameters": parameter_count(peer)}
    figures |= {"length": len(texts.windows[0]), "tokens": sum(map(len, texts.windows))}
    figures["bfloat16_bytes"] = sum(stored.values())
    for side, model in sides.items():
        figures[f"{side}perplexity"] = _perplexity(model, texts)
        figures[f"{side}tokens_per_second"] = tokens / median(seconds[side][UNTIMED:])
    return figures


def continuations(model: Any, prompts_BT: Tensor, tokens: int) -> list[list[int]]:
    """Greedy continuations of each prompt by `tokens` tokens, past any end of text."""
    prompts_BT = prompts_BT.to(model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompts_BT), "do_sample": False}
    options |= {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    own = model.generation_config
    try:
        with torch.no_grad():
            out: Tensor = inspection.generating_plainly(model).generate(prompts_BT, **options)
    finally:
        model.generation_config = own
    return out[:, prompts_BT.shape[1] :].tolist()


def _check(config: QuantizeConfig, output: Path, *idle: str) -> None:
    if given := config.given(*idle, "records", "page"):
        raise ClearheadError(f"{', '.join(given)} has no effect on a model that is saved")
    require_new(output)
    check_models(config)


def _read(config: QuantizeConfig, tokenizer: Any) -> tuple[Corpus, Texts]:
    """The corpus, and the windows of its held-out part that are measured."""
    corpus = prepare(text_of(config.data, config.models), tokenizer=tokenizer, progress=say)
    count = max(1, config.tokens // config.length)
    return corpus, Texts(windows=list(windows(corpus, length=config.length, count=count)))


def _perplexity(model: Any, texts: Texts, how: Scheme | None = None) -> float:
    result = cost(model, how, texts)
    if result.perplexity is None:
        raise ClearheadError(f"no perplexity: {result.reason}")
    return result.perplexity


def _seal(folder: Path, figures: dict[str, Any], device: torch.device, package: str) -> None:
    """Write the figures into the saved folder, and its checksums."""
    figures["bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    figures |= {**provenance(device), "versions": versions(package)}
    write_json(folder / "quantization.json", figures)
    manifest.seal(folder)
