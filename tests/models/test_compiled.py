"""Models as graphs: compiled whole or by layers, and exported for any length."""

from functools import partial
from itertools import product

import onnxruntime
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.export import Dim, export
from transformers import CompileConfig, DynamicCache
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from clearhead import ClearheadForCausalLM
from clearhead.models.base_model import CACHE
from clearhead.models.inspection import decoder_layers
from clearhead.ops import dispatch
from clearhead.ops.requests import Request

from . import space
from .space import CAUSAL, MECHANISMS

LONGEST = 200


_model = partial(space.build, num_hidden_layers=1, max_position_embeddings=256)


def _ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def _inputs(kind: str, length: int = 13) -> dict[str, Tensor]:
    """Arguments of a training step."""
    ids, place = _ids(length=length), torch.arange(length).expand(2, -1)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        inputs["attention_mask"] = (place >= torch.tensor([[3], [0]])).long()
        inputs["labels"][0, :4] = -100
    if kind == "packed":
        inputs["document_ids"] = place // 5
    return inputs


# In these alone branches differ without padding: in packed rows, here of grouped heads in a window,
# and after a cache.
SPREAD = ("transformer", "differential", "coca-slack", "alibi", "forget", "key-value", "sas")


@pytest.mark.parametrize(
    ("name", "keys", "kind"),
    [
        *((name, keys, "padded") for name, keys in MECHANISMS if name not in SPREAD),
        ("bert", {}, "padded"),
        *((name, {"num_key_value_heads": 2, "sliding_window": 4}, "packed") for name in SPREAD),
        *((name, {}, "cached") for name in ("transformer", "coca-slack")),
    ],
)
def test_a_compiled_model_has_the_loss_and_gradients_of_the_eager_one(name, keys, kind):
    torch._dynamo.reset()
    model, inputs, past = _model(name, **keys), _inputs(kind), None
    if kind == "cached":
        past = inputs["input_ids"][:, :5]
        inputs = {key: x[:, 5:] for key, x in inputs.items()}
    for weight in model.parameters():  # nothing stays at a start of 0, which hides gradients
        nn.init.normal_(weight, std=0.3)

    def step(run: nn.Module) -> tuple[Tensor, ...]:
        cache = {}
        if past is not None:
            cache = {CACHE: DynamicCache()}
            with torch.no_grad():
                model.eval()(past, **cache)
        model.train()
        loss = run(**inputs, **cache).loss
        weights = list(model.parameters())
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return loss, *gradients

    compiled = torch.compile(model, fullgraph=name in CAUSAL, backend="aot_eager")
    for got, wanted in zip(step(compiled), step(model), strict=True):
        assert torch.allclose(
            got, wanted, rtol=1e-4, atol=1e-5 * max(1.0, float(wanted.abs().max()))
        )


@pytest.mark.parametrize(
    ("name", "keys", "backend"),
    [
        *((name, {}, "aot_eager") for name in SPREAD[1:]),
        ("transformer", {"num_key_value_heads": 2}, "inductor"),
    ],
)
def test_generation_compiled_whole_with_a_static_cache_gives_the_same_tokens(name, keys, backend):
    torch._dynamo.reset()
    model, ids = _model(name, **keys), _ids(length=5)
    assert model._can_compile_fullgraph
    how = CompileConfig(fullgraph=True, mode="default", backend=backend)
    how._compile_all_devices = True  # transformers would do it on a GPU alone
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    options |= {"max_new_tokens": 6}
    counters.clear()
    compiled = model.generate(ids, cache_implementation="static", compile_config=how, **options)
    assert counters["stats"]["unique_graphs"] in (1, 2)  # a whole step is one
    assert torch.equal(compiled, model.generate(ids, **options))


@pytest.mark.parametrize(
    ("name", "keys", "padded"),
    [
        *((name, keys, True) for name, keys in MECHANISMS),
        ("transformer", {"mlp_rotation": "hadamard"}, False),
        ("sas", {"normalizer": "sink", "sliding_window": 5}, False),
    ],
)
@torch.no_grad()
def test_a_model_is_exported_for_any_batch_and_length(name, keys, padded):
    if name.startswith("differential") and Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 cannot prove the strides of two maps for every length")
    model, sizes = _model(name, use_cache=False, **keys), {0: Dim("batch", min=2, max=16)}
    sizes[1] = Dim("length", min=2, max=LONGEST)

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, : length // 4] = 0
        ids = {"input_ids": _ids(batch, length)}
        return ids | {"attention_mask": mask} if padded else ids

    example = inputs(3, 9)
    program = export(model, (), example, dynamic_shapes=dict.fromkeys(example, sizes))
    for length in (2, 12, LONGEST):  # more than one tile, and than one block of a running mean
        given = inputs(5, length)
        got, wanted = program.module()(**given).logits, model(**given).logits
        shown = given.get("attention_mask", torch.ones(5, length)) == 1
        assert torch.allclose(got[shown], wanted[shown], atol=1e-4)


def test_a_step_with_a_static_cache_is_exported():
    model, ids = _model("transformer"), _ids(1, 1)
    model.generation_config.cache_implementation = "static"
    TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=32).export(ids)


class Step(nn.Module):
    """One token after a cache of any length, as a function of tensors."""

    def __init__(self, model: ClearheadForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        cache = DynamicCache(list(zip(keys, values, strict=True)))
        logits = self.model(ids, past_key_values=cache).logits[:, -1]
        return logits, *_stacked(cache)


def _stacked(cache: DynamicCache) -> tuple[Tensor, Tensor]:
    keys, values = zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True)
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize(("name", "keys"), MECHANISMS)
@torch.no_grad()
def test_a_step_with_a_cache_runs_in_onnx(name, keys, tmp_path):
    model, ids, cache = _model(name, **keys), _ids(1, 7), DynamicCache()
    model(ids[:, :6], past_key_values=cache)
    past = Dim("past", min=2, max=LONGEST)
    program = export(
        Step(model),
        (ids[:, 6:], *_stacked(cache)),
        dynamic_shapes=({}, {3: past}, {3: past}),
        prefer_deferred_runtime_asserts_over_guards=True,  # the solver gives up on V1's strides
    )
    # ONNX's own optimizer takes a third of the time.
    made = torch.onnx.export(program, (), verbose=False, optimize=name == "differential")
    made.save(tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    names = [each.name for each in session.get_inputs()]
    ids, cache = _ids(1, 16), DynamicCache()
    wanted = model(ids).logits
    model(ids[:, :12], past_key_values=cache)
    state = [each.numpy() for each in _stacked(cache)]
    for place in range(12, 16):
        token = ids[:, place : place + 1].numpy()
        logits, *state = session.run(None, dict(zip(names, (token, *state), strict=True)))
        assert torch.allclose(torch.from_numpy(logits), wanted[:, place], atol=1e-4)


WIDE_SHAPE = {"hidden_size": 256, "num_hidden_layers": 3}
HOPPER = {"device": "cuda", "ordinal": 0, "capability": (9, 0), "dtype": torch.bfloat16}
ROW = 40
# A mechanism that asks for another kernel, or has graphs of its own, each.
PLAIN = [
    *("transformer", "differential", "differential-v2", "coca-slack", "pope", "sink", "softpick"),
    *("key-value", "forget", "sas", "bert-sas"),
]
# Softmax that needs no log-sum-exp, over values as wide as keys, is PyTorch's own call.
EXCHANGED = {"sink", "key-value"}
WIDE = {"forget", "differential", "pope"}
# The first layer's values are its own matrix, the others' the stream.
TWO_KINDS = {"sas", "bert-sas"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "plain") for name in PLAIN), *product(("transformer", "sas"), ("padded", "packed"))],
)
def test_a_compiled_request_is_given_the_eager_ones_kernel_on_a_gpu(name, kind, monkeypatch):
    """And layers that are alike share one graph, whatever their index, gains and λ_init."""
    asked: list[Request] = []
    chosen = dispatch._chosen

    def record(names: str, *arguments: object) -> str:
        asked.append(dispatch.request(*arguments))
        return chosen(names, *arguments)

    monkeypatch.setattr(dispatch, "_chosen", record)
    model, inputs, requests = space.build(name, **WIDE_SHAPE).train(), _inputs(kind, ROW), {}
    for how in ("eager", "compiled"):
        asked.clear()
        if how == "compiled":
            torch._dynamo.reset()
            counters.clear()
            for layer in decoder_layers(model):
                layer.compile(backend="eager")
        model(**inputs).loss.backward()
        requests[how] = {each._replace(**HOPPER) for each in asked}
    graphs = 2 if name in TWO_KINDS else 1
    assert counters["stats"]["unique_graphs"] == graphs
    kernels = {how: {dispatch.resolve(each).name for each in requests[how]} for how in requests}
    want = "flash-packed"
    if kind == "plain":
        want = "cudnn" if name in EXCHANGED | WIDE else "sdpa"
    if (name, kind) == ("key-value", "plain"):  # of a CPU alone: its tiles join the prefix
        kernels["eager"] = {"cudnn"}
    names = set() if name == "softpick" else {want}  # which is plain PyTorch
    assert kernels == {"eager": names, "compiled": names}
    torch._dynamo.reset()
