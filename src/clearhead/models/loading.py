"""Loading of checkpoints, refused in one line if a weight is missing or left over.

Everything here reads safetensors only. Python code that a folder brings runs only where
`trust_remote_code` is true; there is never a prompt on standard input.
"""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers.utils import find_adapter_config_file
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from clearhead.errors import ClearheadError
from clearhead.records.manifest import verify_model
from clearhead.terminal import say

AUTO_CLASS = {  # by kind
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "bare": transformers.AutoModel,
}
_POOLER = re.compile(r"(^|\.)pooler\.")  # an encoder's last layer, that only classifiers read
_SHOWN = 3  # weights that a message names
_GIB = 2**30
_GIVE = "give a folder with config.json, model.safetensors and a tokenizer, or a hub name"


def load(
    name: str, kinds: tuple[str, ...] = ("causal",), *, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the CPU, and its tokenizer.

    A kind is "causal", "masked" or "bare": saved without a head for language.
    """
    name = resolved(name)
    verify_model(Path(name))
    kind = kind_of(name, trust_remote_code=trust_remote_code)
    if kind not in kinds:
        saved = str(load_config(name, trust_remote_code=trust_remote_code).architectures)
        if kind == "masked" or "Classification" in saved:
            raise ClearheadError(f"{name}, saved as {saved}, predicts no next token: give another")
        kind = "causal"  # a bare trunk may still be completed, by a head that is the embedding
    head: Literal["saved", "none"] = "none" if kind == "bare" else "saved"
    with explained(name):
        model = pretrained(AUTO_CLASS[kind], name, head=head, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    return model.eval(), tokenizer


def pretrained(
    auto: Any,
    name: str | Path,
    *,
    head: Literal["saved", "none", "new"] = "saved",
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """`auto.from_pretrained(name, **options)` with every weight accounted for.

    In a folder of clearhead's no weight may be left over; for another library's model one printed
    line names those that are.

    The head may be "saved", required of the checkpoint; "none", for the trunk alone; or "new",
    initialised where the checkpoint has another class's, or one of another size.
    """
    if find_adapter_config_file(str(name)) is not None:
        raise ClearheadError(f"{str(name)!r} has an adapter: merge it by PEFT's merge_and_unload()")
    with without_bars():
        model, info = auto.from_pretrained(
            name,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # refused below, with the sizes
            output_loading_info=True,
            **options,
        )
    if hasattr(model, "ct_decompress_hook"):  # which a call of the trunk alone would not meet
        model.hf_quantizer.compressor.decompress_model(model)
    if getattr(model.config, "attn_logit_softcapping", None):  # which 5.17's sdpa leaves out
        model.set_attn_implementation("eager")
    if fault := _fault(str(name), model, info, head):
        raise ClearheadError(f"{str(name)!r} {fault} save or download it again")
    return model


def _fault(name: str, model: Any, info: Mapping[str, Any], head: str) -> str:
    """The fault of a checkpoint's weights, "" for none; one of another class has another head."""
    kind, trunk = type(model).__name__, model.base_model_prefix and f"{model.base_model_prefix}."
    another = head != "saved" and kind not in (model.config.architectures or ())
    missing, over = set(info["missing_keys"]), set(info["unexpected_keys"])
    if another:
        over = {key for key in over if key.startswith(trunk)}
    if another and head == "new":
        missing = {key for key in missing if key.startswith(trunk)}
    if another or head == "none":
        missing = {key for key in missing if not _POOLER.search(key)}
    if missing:
        return f"lacks {_some(missing)} of a {kind}, or its config.json is another model's:"
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        if head != "new" or key.startswith(trunk):
            sizes = f"{key} is {tuple(stored)}, not {tuple(wanted)}"
            return f"has other sizes than its config.json says ({sizes}):"
    if scales := {key for key in over if "scale" in key.rpartition(".")[2]}:
        return f"has scales of weights in few bits ({_some(scales)}) without a quantization_config:"
    if over and model.config.model_type == "clearhead":
        return f"has {_some(over)} that a {kind} of its config.json has no place for:"
    if over:
        say(f"{name}: {_some(over)} not used, for a {kind} has no place for them")
    return ""


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration in a folder or of a hub name; errors are `explained`."""
    with explained(name):
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def kind_of(name: str, *, trust_remote_code: bool = False) -> str:
    """The kind that a checkpoint was saved as, as for `load`; causal where it does not say."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise ClearheadError(f"{name!r} is an encoder-decoder ({config.model_type}): give another")
    saved = next(iter(getattr(config, "architectures", None) or ()), "ForCausalLM")
    if saved.endswith("ForMaskedLM"):
        return "masked"
    return "causal" if saved.endswith(("ForCausalLM", "LMHeadModel")) else "bare"


@contextmanager
def explained(name: str, what: str = "model", allow: str = "") -> Iterator[None]:
    """Turn errors of the body into a one-line ClearheadError: why `what` cannot be loaded; `allow`
    is as in `refuse_code`."""
    try:
        yield
    except (ClearheadError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and the hub each raise their own
        refuse_code(name, what, error, allow)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # a heading has no reason
        raise ClearheadError(f"cannot load a {what} from {name!r} ({reason}): {_GIVE}") from error


def refuse_code(name: str, what: str, error: Exception, allow: str = "") -> None:
    """Raise a ClearheadError if transformers' `error` asks for `trust_remote_code`."""
    if "trust_remote_code=True" in str(error):
        allow = allow or "read that code, and allow it by --trust-remote-code"
        raise ClearheadError(
            f"the {what} {name!r} brings Python code of its own, which is not run unasked: {allow}"
        ) from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which would break up ours, and its tables of weights."""

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    # With its logger's level raised, transformers warns of weights through another.
    logger, shown = logging.getLogger("transformers.modeling_utils"), is_progress_bar_enabled()
    logger.addFilter(other)
    disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(other)
        if shown:
            enable_progress_bar()


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = ", …" if len(names) > _SHOWN else ""
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} weight{plural} ({', '.join(names[:_SHOWN])}{more})"


def resolved(name: str) -> str:
    """The folder of the finished model, for a run's folder; any other name unchanged."""
    path = Path(name)
    if (path / "final").is_dir():
        return str(path / "final")
    if (path / "run.json").exists():
        raise ClearheadError(
            f"the run in {name} is not finished: go on by clearhead train --resume {name}, or make "
            f"a model of a checkpoint by clearhead convert {name}/checkpoints/step-… FOLDER"
        )
    # No name of the hub's, or one that begins with an existing folder.
    local = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None
    if not local and "/" in name and path.parent.is_dir():
        local = not isinstance(try_to_load_from_cache(name, "config.json"), str)
    if local and not path.exists():
        raise ClearheadError(f"cannot load a model from {name!r} (no such folder): {_GIVE}")
    if any(path.glob("shard-*.safetensors")) and (path / "config.json").exists():
        raise ClearheadError(
            f"{name!r} is a run's checkpoint: make a model of it by clearhead convert {name} FOLDER"
        )
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ClearheadError(f"{name!r} holds adapters: open RUN/final, where they are merged")
    return name


def best_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def available(device: torch.device) -> float:
    """Bytes that are free on a GPU, or on the CPU without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    stated = re.search(r"MemAvailable: +(\d+)", meminfo.read_text() if meminfo.exists() else "")
    return int(stated[1]) * 1024 if stated else math.inf


def require_memory(wanted: float, what: str, device: torch.device) -> None:
    """Refuse work for which less than `wanted` bytes are available."""
    if wanted > (free := available(device)):
        needs, has = (f"{number / _GIB:.1f} GiB" for number in (wanted, free))
        raise ClearheadError(f"{what} wants {needs} of memory, and {has} are available")


def require_room(name: str, work: str, *, copies: float, wide: bool = False) -> None:
    """Refuse to load a model for work that holds so many `copies` of all its weights, in float32 if
    `wide`, if they would not fit into memory."""
    folder = Path(resolved(name))
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    total = 0
    for path in folder.glob("model*.safetensors"):  # Mistral's folders hold the weights twice
        if not wide:
            total += path.stat().st_size
            continue
        with suppress(SafetensorError), safe_open(path, "pt") as weights:  # loading names the fault
            shapes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118
            total += 4 * sum(map(math.prod, shapes))
    require_memory(copies * total, f"{work} of {name}", best_device())
