"""The form for servers: the same function by one attention call a layer, without clearhead."""

import inspect
import json
import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, ContinuousBatchingConfig

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
from clearhead.models import PRESETS
from clearhead.models.conversion import for_serving, logit_difference
from clearhead.models.serving import modeling_clearhead_serving as form
from clearhead.models.serving import served
from clearhead.ops import oracles

from . import serving_page
from .space import WHOLE, YARN, displaced

SHAPE = {key: value for key, value in WHOLE.items() if key != "intermediate_size"}
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
    (
        "sas",
        {"values": "reparametrised", "projections": "reparametrised", "value_init": "orthogonal"},
    ),
    ("sas", {"values": "reparametrised", "projections": "reparametrised", "bias": True}),
    ("sas-p", {"bias": True, "norm": "layernorm"}),
    ("gated", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
]


def _model(name: str, changes: dict[str, Any]) -> ClearheadForCausalLM:
    return displaced(preset(name, **SHAPE | changes), 0.2)


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
    hidden = [
        made.model(
            input_ids=ids[:1, start:stop],
            position_ids=torch.arange(start, stop)[None],
            use_cache=False,
            attention_instances=instances,
            return_dict=False,
        )[0]
        for start, stop in pairwise(steps)
    ]
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
    ("name", "changes", "reason"),
    [
        ("differential", {"normalizer": "softmax1"}, "maps='differential' does not fit: it has"),
        ("key-bias", {}, "normalizer='key' does not fit: it has 'softmax'"),
        ("alibi", {}, "position='alibi'"),
        ("forget", {}, "position='forget'"),
        ("xpos", {}, "position='xpos'"),
        ("key-value", {}, "normalizer='key-value'"),
        ("gated", {"mlp_rotation": "hadamard"}, "mlp_rotation='hadamard' does not fit"),
        ("gated", {"shaping": "skipinit"}, "it has 'none' or 'shaped'"),
        ("gated", {"layer_overrides": [{}, {"maps": "differential-v2"}]}, "layer_overrides="),
        ("xsa", {"annealed_start": True}, "has come in by 0% only; train it to the end"),
        ("gated", {"embedding_norm": "rmsnorm"}, "embedding_norm='rmsnorm' does not fit"),
        (
            "coca",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotates cached keys anew",
        ),
        (  # Llama has a place for it, and keeps cached keys as they were turned
            "transformer",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotates cached keys anew",
        ),
    ],
)
def test_what_one_call_a_layer_cannot_hold_is_refused(name, changes, reason):
    with pytest.raises(ClearheadError, match="no form for servers: ") as refusal:
        for_serving(_model(name, changes))
    assert reason in str(refusal.value)
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
