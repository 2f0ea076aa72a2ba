"""Any point of the axes: refused in one line, or it builds, trains, saves, reloads, generates."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead import ClearheadConfig, ClearheadForCausalLM
from clearhead.models import ClearheadModel, plan
from clearhead.nn import REGISTRY
from clearhead.spec import AXES

from . import space

FACTOR = {"factor": 2.0}
ROPES = [
    None,
    {"rope_type": "default", "rope_theta": 100.0},
    *({"rope_type": kind, **FACTOR} for kind in ("linear", "dynamic", "yarn")),
    {"rope_type": "llama3", **FACTOR, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]
OPTIONS = {
    "rope_parameters": st.sampled_from(ROPES),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([4, 8]),
    "lambda_init": st.sampled_from([None, 0.5, 0.8]),
    "head_norm": st.sampled_from(["affine", "plain", "none"]),
    "bias": st.booleans(),
    "sliding_window": st.sampled_from([3, 6]),
    "layer_types": st.just(["sliding_attention", "full_attention"]),
    "tie_word_embeddings": st.booleans(),
    "num_value_heads": st.sampled_from([2, 4]),
    "first_values": st.sampled_from(REGISTRY.names("values")),
    "value_init": st.sampled_from(["normal", "orthogonal", "identity"]),
    "value_gain": st.sampled_from([0.2, 1.0]),
    "query_range": st.sampled_from([0.0, 0.3]),
    "attention_gain": st.sampled_from([0.5, 1.0]),
    "mlp_gain": st.sampled_from([0.1, "depth"]),
    "mlp_skip_gain": st.just(1.0),
    # Shorter than the texts, so that scaled positions are at work.
    "max_position_embeddings": st.sampled_from([8, 24]),
}


def _sensible(point: dict[str, Any]) -> dict[str, Any]:
    """Without the options that would have no effect: else most points would be refused."""
    dropped = set()
    if point["maps"] != "differential":
        dropped |= {"lambda_init", "head_norm"}
    if point["position"] != "rope":
        dropped |= {"rope_parameters"}
    if point["position"] in ("alibi", "forget", "xpos"):
        dropped |= {"direction"}
    if point["position"] in ("alibi", "forget") and point["shaping"] == "shaped":
        dropped |= {"shaping"}
    if point["position"] == "forget" and point["normalizer"] == "key-value":
        dropped |= {"normalizer"}
    if point["position"] not in ("rope", "xpos"):
        dropped |= {"scores"}
    if point["scores"] == "pope" or point["normalizer"] == "softpick":
        dropped |= {"shaping", "query_range"}
    if point["scores"] == "dot" or point["shaping"] not in ("shaped", "skipinit"):
        dropped |= {"query_range"}
    if point["order"] == "parallel":
        dropped |= {"attention_skip", "mlp_skip", "mlp_skip_gain"}
    if point["mlp_skip"] == "none":
        dropped |= {"mlp_skip_gain"}
    if point["shaping"] != "none" or point["attention_skip"] == "none":
        dropped |= {"epilogue"}
    if point["scores"] != "dot":
        dropped |= {"normalizer"}
    if point["direction"] != "causal":
        dropped |= {"sliding_window", "layer_types"}
    if "sliding_window" not in point:
        dropped |= {"layer_types"}
    kinds = {point["values"], point.get("first_values"), point["projections"]}
    if "reparametrised" not in kinds:
        dropped |= {"value_gain"}
    dropped |= {"num_value_heads", "value_init"}
    kept = {key: value for key, value in point.items() if key not in dropped}
    kept["head_dim"] = 4  # as wide as the stream
    if point["shaping"] != "none" and point["maps"] == "differential":
        kept["head_norm"] = "none"
    return kept


DRAWN = st.fixed_dictionaries(
    {axis: st.sampled_from(REGISTRY.names(axis)) for axis in AXES}, optional=OPTIONS
)
POINTS = st.one_of(DRAWN, DRAWN.map(_sensible))


def _model(config: ClearheadConfig) -> Any:
    kind = ClearheadForCausalLM if config.direction == "causal" else ClearheadModel
    return kind(config)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(model, ClearheadForCausalLM):
        return model(ids, use_cache=False).logits
    return model(ids).last_hidden_state @ model.embed_tokens.weight.T


def _train(model: Any, ids: torch.Tensor) -> None:
    """Five steps; every gradient finite, and of every parameter one that is not zero.

    What starts at 0 keeps others from moving: a gain W_Q, and that W_K.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moved = set()
    for step in range(5):
        for module in model.modules():  # what training moves beside the weights
            if step and hasattr(module, "on_step_end"):
                module.on_step_end(step / 5)
        logits = _logits(model, ids)[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            if (p.grad != 0).any():
                moved.add(name)
        optimizer.step()
        optimizer.zero_grad()
    still = {name for name, _ in model.named_parameters()} - moved
    # The same for every key of a row: softmax does not see it, where nothing turns the keys.
    assert {name for name in still if not name.endswith("k_proj.bias")} == set()
    model.eval()


@pytest.mark.parametrize("scores", REGISTRY.names("scores"))
def test_every_attention_trains(scores):
    ids = torch.randint(0, 31, (2, 7))
    for point in space.attentions():
        if point["scores"] == scores:
            _train(_model(space.config(**point)), ids)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(point=POINTS)
def test_any_point_is_refused_or_lives(point):
    config = space.config(**point)
    if config is None:
        return
    torch.manual_seed(0)
    ids = torch.randint(0, 31, (2, 8))
    model = _model(config)
    _train(model, ids)
    with torch.no_grad():
        before = _logits(model, ids)
        assert before.isfinite().all()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(_logits(again, ids), before)
    assert again.config.layer(1) == config.layer(1)
    assert plan(config).parameters >= sum(p.numel() for p in model.parameters())
    if config.direction == "causal" and config.position != "learned":
        out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert out.shape == (2, 12)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(point=POINTS)
def test_the_cache_holds_what_the_plan_says(point):
    config = space.config(**point)
    if config is None or config.direction != "causal":
        return
    cache = ClearheadForCausalLM(config).eval()(torch.zeros(1, 1, dtype=torch.long)).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert plan(config, length=1).cache_bytes == 2 * held


def test_the_table_of_what_fits():
    """15 places to compare and count from, times 4 normalizers, times 3 kinds of maps; and with
    dot products a key bias from 8 places, a learned key and value from 7."""
    assert len(space.attentions()) == 14 * 12 + 7 * 3 + 6 * 3
    for point in space.attentions():
        both_ways = space.config(direction="bidirectional", **point)
        assert (both_ways is None) == (point["position"] in ("alibi", "forget", "xpos"))
    assert space.config(position="alibi", scores="coca") is None
