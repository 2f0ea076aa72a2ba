"""Models as graphs: compiled whole, and exported for any length."""

import onnxruntime
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.export import Dim, export
from transformers import CompileConfig, DynamicCache
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models.base_model import CACHE

from .space import CAUSAL, DISTINCT, WHOLE

SHAPE = WHOLE | {"num_hidden_layers": 1, "max_position_embeddings": 256}
LONGEST = 200


def _model(name: str, **overrides: object) -> ClearheadForCausalLM | ClearheadForMaskedLM:
    torch.manual_seed(0)
    config = preset(name, **SHAPE | overrides)
    of = ClearheadForCausalLM if config.direction == "causal" else ClearheadForMaskedLM
    return of(config).eval()


def _ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


# In these alone branches differ without padding: in packed rows, here of grouped heads in a window,
# and after a cache.
SPREAD = ("transformer", "differential", "coca-slack", "alibi", "forget", "key-value", "sas")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "padded") for name in (*DISTINCT, "bert", "bert-sas")),
        *((name, "packed") for name in SPREAD),
        *((name, "cached") for name in ("transformer", "coca-slack", "sas")),
    ],
)
def test_a_compiled_model_has_the_loss_and_gradients_of_the_eager_one(name, kind):
    torch._dynamo.reset()
    keys = {"num_key_value_heads": 2, "sliding_window": 4} if kind == "packed" else {}
    model, (inputs, past) = _model(name, **keys), _inputs(kind)
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


def _inputs(kind: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """Arguments of a training step, and the tokens before it in a cache."""
    ids = _ids(length=13)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :3] = 0
        inputs["labels"][0, :4] = -100
    elif kind == "packed":
        inputs["document_ids"] = torch.tensor([[0] * 4 + [1] * 9] * 2)
    elif kind == "cached":
        return {key: x[:, 5:] for key, x in inputs.items()}, ids[:, :5]
    return inputs, None


@pytest.mark.parametrize(
    ("name", "keys", "backend"),
    [
        *((name, {}, "aot_eager") for name in SPREAD[1:-1]),
        ("transformer", {"num_key_value_heads": 2}, "inductor"),
        ("sas", {}, "inductor"),
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
    torch._dynamo.utils.counters.clear()
    compiled = model.generate(ids, cache_implementation="static", compile_config=how, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] in (1, 2)  # a whole step is one
    assert torch.equal(compiled, model.generate(ids, **options))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("transformer", {}),
        ("key-value", {"mlp_rotation": "hadamard"}),
        ("sink", {"sliding_window": 5}),
        ("sas", {"sliding_window": 5}),
    ],
)
@torch.no_grad()
def test_a_model_is_exported_for_any_length(name, keys):
    _skip_what_is_not_provable(name)
    model = _model(name, use_cache=False, **keys)
    length = Dim("length", min=2, max=LONGEST)
    program = export(model, (), {"input_ids": _ids()}, dynamic_shapes={"input_ids": {1: length}})
    for tokens in (2, 9, LONGEST):  # more than one tile, and than one block of a running mean
        ids = _ids(length=tokens)
        got = program.module()(input_ids=ids).logits
        assert torch.allclose(got, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("name", DISTINCT)
@torch.no_grad()
def test_a_model_is_exported_for_any_padded_batch(name):
    _skip_what_is_not_provable(name)
    model, sizes = _model(name, use_cache=False), {0: Dim("batch", min=2, max=16)}
    sizes[1] = Dim("length", min=2, max=LONGEST)
    inputs = {"input_ids": _ids(3), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    program = export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, sizes))
    ids, mask = _ids(5, 12), torch.ones(5, 12, dtype=torch.long)
    mask[0, :3] = 0
    got = program.module()(input_ids=ids, attention_mask=mask).logits
    wanted = model(ids, attention_mask=mask).logits
    assert torch.allclose(got[mask == 1], wanted[mask == 1], atol=1e-4)


def test_a_step_with_a_static_cache_is_exported():
    model, ids = _model("transformer").eval(), _ids(1, 1)
    model.generation_config.cache_implementation = "static"
    TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=32).export(ids)


def _skip_what_is_not_provable(name: str) -> None:
    if name.startswith("differential") and Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 cannot prove the strides of two maps for every length")


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


@pytest.mark.parametrize("name", DISTINCT)
@torch.no_grad()
def test_a_step_with_a_cache_runs_in_onnx(name, tmp_path):
    model, ids, cache = _model(name), _ids(1, 7), DynamicCache()
    model(ids[:, :6], past_key_values=cache)
    past = Dim("past", min=2, max=LONGEST)
    program = export(
        Step(model),
        (ids[:, 6:], *_stacked(cache)),
        dynamic_shapes=({}, {3: past}, {3: past}),
        prefer_deferred_runtime_asserts_over_guards=True,  # the solver gives up on V1's strides
    )
    simplified = name in SPREAD  # by ONNX's own optimizer, which takes a third of the time
    made = torch.onnx.export(program, (), verbose=False, optimize=simplified)
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
