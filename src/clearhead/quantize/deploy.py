"""Models saved in few bits: torchao's tensors, written as safetensors and loaded like any other.

transformers takes torchao's tensor subclasses apart into plain tensors and describes them in the
file's header, so nothing is ever pickled; loading names the classes from a fixed list.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError, choose, require
from clearhead.models.inspection import generating_plainly
from clearhead.models.loading import pretrained, save_tokenizer, without_bars
from clearhead.quantize.linear import linear_layers
from clearhead.records.files import publish_folder, require_new

GROUP = 128  # inputs that share a scale in int4
INT4_INPUTS = 1024  # of which torchao's tiles of 4-bit weights hold a multiple, by padding


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A saved model in few bits, beside the one in bfloat16 that it was made from.

    Attributes:
        model, peer: both loaded, in evaluation mode, on the device that they were made for.
        bytes, peer_bytes: of their safetensors files.
        layers: the quantised linear layers. others: linear layers that torchao does not know.
        trust_remote_code: whether the model is opened with Python code of its folder.
    """

    model: Any
    peer: Any
    bytes: int
    peer_bytes: int
    layers: tuple[str, ...]
    others: tuple[str, ...]
    trust_remote_code: bool


def _int4(torchao: Any) -> Any:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ClearheadError(
            "int4-weight-only needs a CUDA device of compute capability 8.0 or more, for which "
            "PyTorch has a 4-bit product; here int8-weight-only and int8-dynamic work"
        )
    # The one layout whose product is PyTorch's own; the default one needs a further package.
    return torchao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")


# Form → its configuration, from `torchao.quantization`.
KINDS: dict[str, Callable[[Any], Any]] = {
    "int8-weight-only": lambda torchao: torchao.Int8WeightOnlyConfig(),
    "int8-dynamic": lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig(),
    "int8-dynamic-tensor": lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig(
        granularity=[torchao.PerTensor(), torchao.PerRow()]
    ),
    "int4-weight-only": _int4,
}


def deploy(
    peer: Any,
    tokenizer: Any,
    source: str,
    kind: str,
    output: Path,
    *,
    trust_remote_code: bool = False,
) -> Deployed:
    """Quantise the linear layers of the model at `source`, save it to `output`, and load it again.

    Args:
        peer: the model of `source` in any floating dtype; it becomes the bfloat16 one.
        tokenizer: saved beside the model.
        source: a folder or hub name.
        kind: one of `KINDS`: int8 weights a scale an output channel; the same with activations in
            int8, a scale a token, when they come; or a scale for all tokens of a call; int4
            weights by groups of 128.
        output: a folder that does not exist yet; it appears whole or not at all.
        trust_remote_code: whether Python code that `source` brings may run.

    Raises:
        ClearheadError: torchao is not installed, the hardware lacks the product, the model has no
            `nn.Linear`, is quantised already, torchao refuses it, or the folder exists.
    """
    torchao = require("torchao", "torchao").quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = KINDS[choose("form", kind, KINDS)](torchao)
    require_new(output)
    layers = linear_layers(peer)
    known = tuple(name for name, module in layers.items() if isinstance(module, nn.Linear))
    if not known:
        raise ClearheadError(
            f"{type(peer).__name__} has no nn.Linear beside its head ({len(layers)} layers of "
            "another class), so torchao would quantise nothing"
        )
    head = peer.get_output_embeddings()
    kept = [name for name, module in peer.named_modules() if module is head]
    load: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "dtype": torch.bfloat16,
        "device_map": str(peer.device),
    }
    try:
        made = pretrained(
            AutoModelForCausalLM,
            source,
            quantization_config=TorchAoConfig(config, modules_to_not_convert=kept),
            **load,
        )
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
        raise ClearheadError(f"torchao cannot make {kind} of {source}: {error}") from error
    with publish_folder(output) as folder, without_bars():
        made.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        _only_safetensors(folder)
    del made
    _round(peer)
    model = pretrained(AutoModelForCausalLM, output, **load)
    with tempfile.TemporaryDirectory() as folder_name, without_bars():
        peer.save_pretrained(folder_name)
        peer_bytes = _size(Path(folder_name))
    return Deployed(
        model=model.eval(),
        peer=peer,
        bytes=_size(output),
        peer_bytes=peer_bytes,
        layers=known,
        others=tuple(name for name in layers if name not in known),
        trust_remote_code=trust_remote_code,
    )


def _round(model: Any) -> None:
    """Cast saved tensors to bfloat16 as `from_pretrained` does; rotary frequencies keep theirs."""
    saved = model.state_dict().keys()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in saved and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)


def continuation(model: Any, ids: list[int], tokens: int) -> list[int]:
    """The `tokens` likeliest tokens after `ids`, one after the other, past any end of text."""
    prompt = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        out: Tensor = generating_plainly(model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(ids) :]]


def continued_elsewhere(
    folder: Path, ids: list[int], tokens: int, device: str, trust_remote_code: bool
) -> list[int]:
    """`continuation` of the model saved in `folder`, loaded by a process of its own.

    Raises:
        ClearheadError: that process failed, with its reason.
    """
    load = {"device_map": device, "trust_remote_code": trust_remote_code}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_continued, folder, ids, tokens, load).result()
        except Exception as error:  # whatever it raised there, or BrokenProcessPool
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ClearheadError(
                f"{folder} was saved, but a new process cannot use it: {reason}"
            ) from error


def _continued(folder: Path, ids: list[int], tokens: int, load: dict[str, Any]) -> list[int]:
    from transformers import AutoModelForCausalLM

    import clearhead.models  # registers our model type  # noqa: F401
    from clearhead import extensions

    extensions.load()
    return continuation(pretrained(AutoModelForCausalLM, folder, **load).eval(), ids, tokens)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _only_safetensors(folder: Path) -> None:
    # A later transformers or torchao may fall back to pickles; better no model than such a one.
    unsafe = [path.name for path in folder.rglob("*") if path.suffix in {".bin", ".pt", ".pkl"}]
    if unsafe or not list(folder.glob("*.safetensors")):
        raise ClearheadError(
            f"these versions of transformers and torchao write {unsafe or 'no weights'} instead of "
            "safetensors: install those in constraints.txt"
        )
