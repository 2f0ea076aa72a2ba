"""Statistics of attention, by hand and in float64; the largest keys and values, and where."""

import math
from types import SimpleNamespace

import pytest
import torch

from clearhead.diagnose import diagnose
from clearhead.diagnose.attention_profile import LogitSizes, RowMeans
from clearhead.ops import oracles
from clearhead.probe import AttentionCall, ByTile
from clearhead.probe import tiles as module_under_test

from .kinds import VOCABULARY, make

SIZES = B, H, G, T, D = 2, 4, 2, 37, 6


def _observed(call: AttentionCall) -> ByTile:
    profile = ByTile(weights=[RowMeans()], scores=[LogitSizes()])
    profile.observe(call)
    return profile


def _oracle(call: AttentionCall) -> SimpleNamespace:
    """Every statistic in float64, over the queries that see a key."""
    q, k = call.q.double(), call.k.double().repeat_interleave(H // G, 1)
    scores = q @ k.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = call.visibility.key_mask
    seen = oracles.visible(T, T, causal=call.causal, key_mask=mask).expand(scores.shape)
    shown = scores.masked_fill(~seen, -torch.inf)
    total = shown.exp().sum(-1)
    if call.sink is not None:
        total = total + torch.as_tensor(call.sink).double().expand(H)[:, None].exp()
    weights = shown.exp() / total[..., None]
    largest = (scores == shown.amax(-1, keepdim=True)) & seen
    null = (1 - weights.sum(-1)).clamp_min(0)
    values = {
        "argmax": largest[..., 0] / largest.sum(-1),
        "mass": weights[..., 0],
        "entropy": torch.special.entr(weights).sum(-1) + torch.special.entr(null),
        "null": null,
        "floor": seen[..., 0] / seen.sum(-1),
    }
    return SimpleNamespace(
        **{name: one[seen.any(-1)].mean().item() for name, one in values.items()},
        logits=scores[seen].abs().sort(descending=True).values.tolist(),
    )


VARIANTS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "softmax-1": {"sink": 0.0},
    "sinks": {"sink": torch.tensor([-1.0, 0.5, 3.0, -80.0])},
    "padded": {"key_mask": (torch.arange(T) < torch.tensor([[T], [20]]))},
    "left-padded": {"key_mask": (torch.arange(T) >= torch.tensor([[0], [7]]))},
    "capped": {"softcap": 1.5},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tile", [1 << 20, 700])
def test_against_float64(tiny, name, tile, monkeypatch):
    monkeypatch.setattr(module_under_test, "TILE", tile)
    call = tiny.call(*SIZES, layer=3, **VARIANTS[name])
    lines, expected = _observed(call).measures(), _oracle(call)
    for metric, wanted in (
        ("first_token_argmax_share", expected.argmax),
        ("first_token_mass", expected.mass),
        ("entropy", expected.entropy),
        *([("null_mass", expected.null)] if call.sink is not None else []),
    ):
        found = tiny.value(lines, metric, map="softmax", layer=3)
        assert found == pytest.approx(wanted, rel=2e-5), metric
        assert tiny.value(lines, metric, map="softmax") == found
    assert tiny.value(lines, "chance_floor") == pytest.approx(expected.floor, rel=2e-5)
    for rank in (1, 2, 3, 10, 100):
        wanted = expected.logits[rank - 1]
        assert tiny.value(lines, f"logit_top_{rank}") == pytest.approx(wanted, rel=1e-5)
    others = {"non_finite_rows"} | ({"null_mass"} if call.sink is None else set())
    assert not others & {line["metric"] for line in lines}


def test_the_median_of_the_logits(tiny):
    """Of one query in 16: the queries 0, 16 and 32, whose logits are known here."""
    q = torch.zeros(1, 1, T, 1)
    q[0, 0, 16], q[0, 0, 32] = 1.0, 3.0
    lines = _observed(tiny.call(*SIZES, q=q, k=torch.ones(1, 1, T, 1), scale=1.0)).measures()
    # 1 zero, 17 ones, 33 threes
    assert tiny.value(lines, "logit_median") == pytest.approx(3.0, rel=3e-3)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_are_counted_and_left_out(tiny, value):
    call = tiny.call(*SIZES)
    call.q[1, 2, 20] = torch.tensor([value, 0, 0, 0, 0, 0])
    clean = call.q.clone()
    profile = _observed(call)
    assert tiny.value(profile.measures(), "non_finite_rows") == 1
    assert all(math.isfinite(line["value"]) for line in profile.measures())
    assert torch.equal(call.q.nan_to_num(), clean.nan_to_num())


def _sizes(model, ids):
    found = diagnose(model, list(ids), batch_size=2).measures
    return [line for line in found if line["metric"] in ("largest_key", "largest_value")]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "softmax1"])
def test_against_a_cache(name):
    """Keys and values as the model's own cache has them."""
    model, ids = make(name), torch.randint(2, VOCABULARY, (3, 17))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    lines = {(x["metric"], x["tokens"], x.get("layer")): x for x in _sizes(model, ids)}
    assert len(lines) == 4 * (1 + len(cache.layers))
    whole = lines["largest_key", "rest", None]
    layers = [lines["largest_key", "rest", n] for n in range(len(cache.layers))]
    top = max(layers, key=lambda x: x["value"])
    assert whole["value"] == top["value"]
    assert whole["where"] == f"layer {top['layer']}, {top['where']}"
    for layer, kept in enumerate(cache.layers):
        for metric, x in (("largest_key", kept.keys), ("largest_value", kept.values)):
            for tokens, part, first in (("first", x[:, :, :1], 0), ("rest", x[:, :, 1:], 1)):
                line = lines[metric, tokens, layer]
                assert line["value"] == pytest.approx(part.abs().max().item(), rel=1e-5)
                top = part.abs().amax(0).transpose(0, 1)
                token, head, channel = (top > top.max() * 0.9999).nonzero()[0].tolist()
                assert line["where"] == f"head {head}, channel {channel}, token {token + first}"


def test_a_prefix_is_kept_apart_and_alibis_columns_do_not_count(tiny):
    model = tiny.make("key-value")
    for name, parameter in model.named_parameters():
        if "normalizer" in name:
            torch.nn.init.normal_(parameter, std=50)
    lines = _sizes(model, torch.randint(2, VOCABULARY, (2, 9)))
    values = {(x["metric"], x["tokens"]): x["value"] for x in lines if x.get("layer") == 0}
    parts = ("first", "rest", "prefix")
    assert set(values) == {(f"largest_{kind}", part) for kind in ("key", "value") for part in parts}
    assert values["largest_key", "prefix"] > 3 * values["largest_key", "rest"]
    model = tiny.make("alibi", initializer_range=0.02)
    lines = _sizes(model, torch.randint(2, VOCABULARY, (1, 40)))
    assert max(x["value"] for x in lines if x["metric"] == "largest_key") < 10
