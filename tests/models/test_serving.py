"""The form for servers: the same function by one attention call a layer, without clearhead; and
folders for llama.cpp's converter, with what it needs beside the function (run in tests/servers).
"""

import inspect
import json
import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, ContinuousBatchingConfig

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
from clearhead.models import PRESETS
from clearhead.models.conversion import converted, for_llama_cpp, for_serving, logit_difference
from clearhead.models.serving import modeling_clearhead_serving as form
from clearhead.models.serving import served
from clearhead.ops import oracles

from . import serving_page
from .space import LLAMA3, WHOLE, YARN, displaced

SHAPE = {key: value for key, value in WHOLE.items() if key != "intermediate_size"}
OLD = {"values": "reparametrised", "projections": "reparametrised"}
FORMS = [
    *("gpt2", "differential-v2", "coca", "coca-strict", "coca-slack", "gated", "gated-headwise"),
    *("xsa", "osp", "parallel", "skipless", "sas", "sas-p", "sas-p-nonorm", "clearhead"),
]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in FORMS] + [
    ("gated", {"normalizer": "sink", "maps": "differential-v2", "num_key_value_heads": 2}),
    ("sas", {"normalizer": "sink", "num_key_value_heads": 2}),
    ("sas-p", {"maps": "differential-v2", "normalizer": "softmax1", "mlp": "relu"}),
    ("sas", {"scores": "coca", "query_range": 0.3}),
    ("coca", {"maps": "differential-v2", "num_key_value_heads": 2}),
    ("gated", {"normalizer": "softmax1", "annealed_start": True}),
    ("xsa", {"num_key_value_heads": 2, "sliding_window": 5, "qk_norm": "rmsnorm"}),
    ("skipless", {"norm": "rmsnorm-single", "bias": True, "tie_word_embeddings": False}),
    ("differential-v2", {"rope_parameters": YARN}),
    ("gated", {"projections": "identity", "attention_gain": 0.7}),
    ("sas", OLD | {"value_init": "orthogonal"}),
    ("sas", OLD | {"bias": True}),
    ("sas-p", {"bias": True, "norm": "layernorm"}),
    ("gated", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FACTOR = {**YARN, "attention_factor": 1.5}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
QWEN3 = {"qk_norm": "rmsnorm"}
LAYERS = {"layer_overrides": [{}, {"maps": "differential-v2"}]}


def _model(name: str, changes: Any = None, **more: object) -> ClearheadForCausalLM:
    return displaced(preset(name, **SHAPE | (changes or {}) | more), 0.2)


def _ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


class Instance:
    """vLLM's attention of one layer: flat tokens, its own cache, the configuration's heads."""

    def __init__(self, config: Any, module: Any) -> None:
        self.heads = {"q": config.num_attention_heads, "kv": config.num_key_value_heads}
        slides = config.layer_types[module.layer_idx] == "sliding_attention"
        self.window = config.sliding_window if slides else None
        self.sink, self.calls = module.sinks, 0
        self.cache: list[list[Tensor]] = [[], []]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.calls += 1
        for kept, new in zip(self.cache, (k, v), strict=True):
            kept.append(new)
        k, v = (torch.cat(kept).unflatten(-1, (self.heads["kv"], -1)) for kept in self.cache)
        heads = (q.unflatten(-1, (self.heads["q"], -1)), k, v)
        heads_BHSD = (x.transpose(0, 1)[None] for x in heads)
        o = oracles.attend(*heads_BHSD, scale=scale, window=self.window, sink=self.sink)
        return o[0].transpose(0, 1).flatten(1).float()


def _as_vllm(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attention_instances: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `vllm_attention_forward`: no mask, no batch, the layer's instance by its index."""
    assert attention_mask is None
    flat = (x.transpose(1, 2).reshape(query.shape[-2], -1) for x in (query, key, value))
    return attention_instances[module.layer_idx](*flat, scaling), None


AttentionInterface.register("as_vllm", _as_vllm)


@pytest.mark.parametrize(("name", "changes"), CASES)
@torch.no_grad()
def test_the_form_is_the_same_function(name, changes):
    ours = _model(name, changes)
    made, ids = served(ours), _ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    wanted, positions = ours(ids).logits, (mask.cumsum(-1) - 1).clamp_min(0)
    assert (made(ids).logits - wanted).abs().max() <= 1e-4
    padded = made(ids, attention_mask=mask, position_ids=positions).logits
    difference = (padded - ours(ids, attention_mask=mask).logits)[mask.bool()]
    assert difference.abs().max() <= 1e-4

    # Cached decoding, with transformers' cache and as vLLM calls the trunk.
    options = {"attention_mask": mask, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 5}
    cached = made.generate(ids, **options)
    assert torch.equal(cached, made.generate(ids, use_cache=False, **options))
    assert torch.equal(cached, ours.generate(ids, **options))
    made.set_attn_implementation("as_vllm")
    layers = [layer.self_attn for layer in made.model.layers]
    instances = {each.layer_idx: Instance(made.config, each) for each in layers}
    steps = [0, 8, 9, 12]
    how = {"use_cache": False, "attention_instances": instances, "return_dict": False}
    hidden = []
    for start, stop in pairwise(steps):
        places = torch.arange(start, stop)[None]
        hidden += made.model(input_ids=ids[:1, start:stop], position_ids=places, **how)[:1]
    logits = made.lm_head(torch.cat(hidden, 1))
    assert (logits - wanted[:1]).abs().max() <= 1e-4
    assert [each.calls for each in instances.values()] == [3, 3]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("coca", "differential-v2", "xsa")),
        ("sas", torch.float32),  # its one matrix for a value is a sum that 16 bits would round
    ],
)
def test_the_form_keeps_the_dtype_of_the_weights_unless_that_moves_logits(name, dtype):
    model = _model(name, {}).bfloat16()
    made = for_serving(model)
    assert {weight.dtype for weight in made.state_dict().values()} == {dtype}
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    assert logit_difference(model.float(), made.float()) < 1e-4


def test_its_attention_is_written_as_vllm_reads_it():
    """vLLM finds the one call in the source, and the scale and the sinks by their attributes."""
    source = inspect.getsource(form.ClearheadServingAttention.forward)
    assert source.count("attention_interface(") == 1
    assert source.count("ALL_ATTENTION_FUNCTIONS") == 1
    assert "scaling=self.scaling," in source
    assert "s_aux=self.sinks," in source
    assert form.ClearheadServingForCausalLM._supports_attention_backend


@pytest.mark.parametrize(
    ("write", "name", "changes", "reason"),
    [
        (for_serving, "differential", {"normalizer": "softmax1"}, "maps='differential' .*: it has"),
        (for_serving, "key-bias", {}, "normalizer='key' does not fit: it has 'softmax'"),
        (for_serving, "alibi", {}, "position='alibi'"),
        (for_serving, "forget", {}, "position='forget'"),
        (for_serving, "xpos", {}, "position='xpos'"),
        (for_serving, "key-value", {}, "normalizer='key-value'"),
        (for_serving, "gated", {"mlp_rotation": "hadamard"}, "mlp_rotation='hadamard' does not"),
        (for_serving, "gated", {"shaping": "skipinit"}, "it has 'none' or 'shaped'"),
        (for_serving, "gated", LAYERS, "layer_overrides="),
        (for_serving, "xsa", {"annealed_start": True}, "has come in by 0% only; train it to"),
        (for_serving, "gated", {"embedding_norm": "rmsnorm"}, "embedding_norm='rmsnorm' does not"),
        (for_serving, "coca", {"rope_parameters": DYNAMIC}, "rotates cached keys anew"),
        # Llama has a place for it, and keeps cached keys as they were turned.
        (for_serving, "transformer", {"rope_parameters": DYNAMIC}, "rotates cached keys anew"),
        (for_llama_cpp, "transformer", {"sliding_window": 5}, "reads a Mistral without its window"),
        (for_llama_cpp, "transformer", QWEN3 | WINDOWS, "reads a Qwen3 without its window"),
        (for_llama_cpp, "transformer", {"rope_parameters": PARTIAL}, "rope_type='proportional'"),
        (for_llama_cpp, "softmax1", {"rope_parameters": FACTOR}, "without its attention_factor"),
        (for_llama_cpp, "sink", {"head_dim": 16}, "reads a GraniteSWA without its head_dim=16"),
        (for_llama_cpp, "differential", {}, "llama.cpp has no DiffLlama: transformers reads"),
        (for_llama_cpp, "sink", {"rope_parameters": DYNAMIC}, "'dynamic' rotates cached keys anew"),
        (for_llama_cpp, "gated", {}, "llama.cpp has no family for this model: Llama has no epil"),
    ],
)
def test_what_would_not_be_the_same_function_is_refused(write, name, changes, reason):
    with pytest.raises(ClearheadError, match=reason) as refusal:
        write(_model(name, changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_form_with_other_logits_is_not_given(dtype):
    model = _model("gated", {}).to(dtype)
    model.model.layers[0].self_attn.register_forward_hook(lambda module, x, out: out * 1.01)
    with pytest.raises(ClearheadError, match="gives other logits"):
        for_serving(model)
    with pytest.raises(ClearheadError, match="is served as it is"):
        for_serving(served(_model("gated", {})))


ALONE = """
import json, sys, torch
sys.modules["clearhead"] = None  # so that importing it fails
from transformers import AutoModel, AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    trunk = AutoModel.from_pretrained(folder, trust_remote_code=True)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(model.lm_head(trunk(ids).last_hidden_state), logits)
    tokens = model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
    print(json.dumps([type(model).__name__, logits.tolist(), tokens.tolist()]))
"""


def test_a_process_without_clearhead_loads_it(tmp_path, warm):
    models = {name: _model(name, {}) for name in ("differential-v2", "sas")}
    models["gated"] = _model("gated", {"normalizer": "sink"})
    for name, model in models.items():
        for_serving(model).save_pretrained(tmp_path / name)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    run = warm.run("-c", ALONE, *(tmp_path / name for name in models), env=environment)
    assert run.returncode == 0, run.stderr
    ids = torch.arange(12)[None]
    for line, model in zip(run.stdout.splitlines(), models.values(), strict=True):
        kind, logits, tokens = json.loads(line)
        assert kind == "ClearheadServingForCausalLM"
        with torch.no_grad():
            assert (torch.tensor(logits) - model(ids).logits).abs().max() <= 1e-4
        own = model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
        assert tokens == own.tolist()


def test_the_page_on_serving_says_what_holds_for_every_preset():
    told = serving_page.table()
    assert told.keys() == PRESETS.keys()
    names = {"LlamaForCausalLM": "Llama", "ClearheadServingForCausalLM": "form"}
    for name, (written, own, _, _, onnx, exported, size) in told.items():
        assert own == "works"
        if preset(name).direction != "causal":
            assert written == "refused: not causal"
            assert (onnx, exported, size) == ("untested", "untested", "none")
            continue
        assert onnx == exported == "works"  # test_compiled.py has every mechanism
        model = _model(name, {})
        assert (name in FORMS) == (written == "form")
        try:
            made = for_serving(model)
        except ClearheadError:
            assert written.startswith("refused: ")
        else:
            kind = type(made).__name__
            assert written == names.get(kind, kind.removesuffix("ForCausalLM"))
            assert _numbers_cached(made) == 1
        gates = 1 / SHAPE["hidden_size"] * 2 if "a gate a head" in size else 0
        assert _numbers_cached(model) == (0.75 if size.startswith("¾") else 1) + gates


@pytest.mark.parametrize("name", ["skipless", "clearhead"])
def test_a_batch_of_requests_gets_what_each_gets_alone_in_the_form(name):
    """transformers' continuous batching; fewer tokens a batch than the prompts have."""
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset(name, **WHOLE, query_range=0.3)).eval()
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7], list(range(20, 37))]
    wanted = {}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        tokens = model.generate(
            ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=60
        )
        wanted[tuple(prompt)] = tokens[0, len(prompt) :].tolist()
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    how = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16, **{page: 4})
    batched = served(model)
    batched.generation_config.update(pad_token_id=0, eos_token_id=60, do_sample=False)
    out = batched.generate_batch(prompts, continuous_batching_config=how, max_new_tokens=6)
    assert all(each.error is None for each in out.values())
    assert {tuple(each.prompt_ids): each.generated_tokens for each in out.values()} == wanted


def test_clearhead_s_own_classes_refuse_continuous_batching_before_any_thread_starts():
    with pytest.raises(ClearheadError, match="the form that `clearhead convert"):
        ClearheadForCausalLM(preset("transformer", **WHOLE)).generate_batch([[1, 2]])


def _numbers_cached(model: Any) -> float:
    """Of a token, relative to a transformer with as many key heads."""
    with torch.no_grad():
        cache = model(_ids(1), use_cache=True).past_key_values
    numbers = sum(each.numel() for layer in cache.layers for each in (layer.keys, layer.values))
    return numbers / (12 * 2 * 2 * SHAPE["hidden_size"])


@pytest.mark.parametrize("name", ["softmax1", "sink"])
def test_a_layer_of_a_model_with_sinks_has_a_window_that_no_text_reaches(name, tmp_path):
    model = _model(name, num_key_value_heads=2)
    for_llama_cpp(model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert config["sliding_window"] == 2**20
    assert config["no_rope_layers"] == [1, 1]
    made = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert logit_difference(model, made) <= 1e-5
    assert logit_difference(model, converted(made)) <= 1e-5
    ids = torch.arange(9)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(made.generate(ids, **options), model.generate(ids, **options))


def test_windows_and_layers_without_position_are_kept_and_named():
    overrides = [{"position": "none"}, {}]
    model = _model("sink", layer_overrides=overrides, **WINDOWS)
    config = for_llama_cpp(model).config
    assert config.layer_types == WINDOWS["layer_types"]
    assert config.sliding_window == 5
    assert config.no_rope_layers == [0, 1]
    assert not hasattr(for_serving(model).config, "no_rope_layers")
    assert for_llama_cpp(model.to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ClearheadError, match="LlamaForCausalLM is served as it is"):
        for_llama_cpp(converted(_model("transformer")))


def test_biases_of_a_qwen3_are_dropped_where_they_are_zero():
    model = _model("transformer", qk_norm="rmsnorm", bias=True)
    assert type(for_serving(model)).__name__ == "ClearheadServingForCausalLM"
    with pytest.raises(ClearheadError, match="no family for this model: the weights of this"):
        for_llama_cpp(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") and ".mlp." in name:
                parameter.zero_()
    made = for_serving(model)
    assert type(made).__name__ == "Qwen3ForCausalLM"
    assert logit_difference(model, converted(made)) <= 1e-5
    with pytest.raises(ClearheadError, match="reads a Qwen3 without the biases of its output"):
        for_llama_cpp(model)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("name", ["transformer", "sink"])
def test_scaled_positions_that_the_converter_reads_are_kept(name, rope):
    kept = for_llama_cpp(_model(name, rope_parameters=rope)).config.rope_parameters
    assert {key: kept[key] for key in rope} == rope


def test_a_layer_without_a_value_projection_has_no_part_of_that_name():
    """vLLM merges the projections of all layers whose parts have the same names."""
    made = for_serving(_model("sas"))
    named = [[name for name, _ in layer.self_attn.named_children()] for layer in made.model.layers]
    assert ["v_proj" in names for names in named] == made.config.value_projections
    assert not all(made.config.value_projections)
