"""The whole of diagnose on each architecture, what it leaves as it was, its gains and advice."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from clearhead import ClearheadError
from clearhead.diagnose import diagnose
from clearhead.diagnose.diagnosis import advise, gain_ratios
from clearhead.models.inspection import longest_text, within_memory

from .conftest import ENCODERS, ROTARY, UNOBSERVED, UNTURNED, VOCABULARY, make

T = 33
HIDDEN = (
    *("kurtosis", "kurtosis_excess", "largest_activation", "hidden_top_100"),
    *("hidden_median", "similarity", "effective_rank", "norm_first", "norm_rest"),
)
ATTENTION = (
    *("first_token_argmax_share", "first_token_mass", "entropy"),
    *("chance_floor", "logit_top_1", "logit_median"),
)
ORDER = ("anomalous_before", "anomalous_weight_before", "order_broken_content")


def _windows(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(2, VOCABULARY, (count, T), generator=generator))


def _values(found: Any, metric: str) -> list[float]:
    return [line["value"] for line in found.measures if line["metric"] == metric]


@pytest.mark.parametrize("name", [*(n for n in ROTARY if n != "DiffLlama"), *UNTURNED, *UNOBSERVED])
def test_the_whole_of_it(name):
    model = make(name)
    implementation = model.config._attn_implementation
    found = diagnose(model, _windows(), batch_size=2)
    assert model.config._attn_implementation == implementation
    assert not model._forward_hooks
    attention, order = ATTENTION * (name not in UNOBSERVED), ORDER * (name in ROTARY)
    for metric in (*HIDDEN, *attention, *order):
        values = _values(found, metric)
        assert values, metric
        assert all(math.isfinite(value) for value in values), metric
    if name in UNOBSERVED:
        (note,) = found.notes
        assert "attention" in note["part"]
        assert type(model).__name__ in note["reason"]
        return
    assert [note["part"] for note in found.notes] == (
        [] if name in ROTARY else ["order of rotary positions"]
    )
    if name == "differential":
        assert len(_values(found, "lambda")) == 3
    if name in ("gpt-oss", "softmax1"):
        assert all(0 < value < 1 for value in _values(found, "null_mass"))


@pytest.mark.parametrize("name", ["Llama", "differential-v2"])
def test_the_batch_size_changes_nothing(name):
    model = make(name)
    first, second = (diagnose(model, _windows(5), batch_size=size).measures for size in (1, 4))
    sampled = {"order_broken_content", "anomalous_before", "anomalous_weight_before"}
    for one, other in zip(first, second, strict=True):
        assert {**one, "value": 0} == {**other, "value": 0}
        if one["metric"] not in sampled:
            assert one["value"] == pytest.approx(other["value"], rel=1e-3, abs=1e-6), one


def test_diffllama_is_refused_until_it_is_converted():
    model = make("DiffLlama")
    with pytest.raises(ClearheadError, match="`clearhead convert` makes of it"):
        diagnose(model, _windows(), batch_size=3)


@pytest.mark.parametrize(
    ("name", "positions"), [("GPT-2", 64), ("OPT", 64), ("BERT", 64), ("RoBERTa", 62)]
)
def test_the_longest_text_is_read_and_no_longer_one(name, positions):
    model, text = make(name), torch.randint(2, VOCABULARY, (65,))
    assert longest_text(model) == positions
    diagnose(model, [text[:positions]], batch_size=1)
    with pytest.raises(ClearheadError, match=f"{positions} learned positions, too few"):
        diagnose(model, [text[: positions + 1]], batch_size=1)


def test_activations_that_are_not_finite_are_reported():
    model = make("Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.inf
    windows = _windows()
    windows[1][20] = 5
    found = diagnose(model, windows, batch_size=3)
    assert _values(found, "non_finite_tokens")[0] > 0
    assert _values(found, "non_finite_rows")[0] > 0
    assert found.advice[0]["metric"] == "non_finite_tokens"
    assert all(math.isfinite(value) for value in _values(found, "entropy"))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([torch.full((T,), VOCABULARY)], "use the tokenizer"),
        ([], "no windows"),
        ([torch.arange(3), torch.arange(4)], "one length"),
        ([torch.arange(9).view(3, 3)], "one-dimensional"),
    ],
)
def test_refusals_leave_the_model_as_it_was(windows, message):
    model = make("Llama").train()
    with pytest.raises(ClearheadError, match=message):
        diagnose(model, windows, batch_size=2)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())


def test_an_encoder_decoder_is_refused_and_only_memory_is_taken_for_memory():
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    t5 = T5ForConditionalGeneration(T5Config(**shape))
    with pytest.raises(ClearheadError, match="no list of"):
        diagnose(t5, _windows(), batch_size=1)
    with pytest.raises(RuntimeError, match="something else"), within_memory("less"):
        raise RuntimeError("something else")


def _measures(share: float, **more: float) -> list[dict]:
    lines = [
        {"metric": "first_token_argmax_share", "map": "softmax", "value": share},
        {"metric": "chance_floor", "value": 0.05},
        # Of a layer and of a head: no whole, and no ground for advice.
        {"metric": "first_token_argmax_share", "map": "softmax", "layer": 1, "value": 0.9},
        {"metric": "first_token_argmax_share", "map": "softmax", "head": 0, "value": 0.9},
    ]
    return lines + [{"metric": name, "map": "softmax", "value": v} for name, v in more.items()]


def test_a_sink():
    (found,) = advise(_measures(0.3), width=64, length=512)
    assert found["finding"].startswith("the first token is a sink: 30% of all queries")
    assert "preset softmax1" in found["advice"]
    assert found["threshold"] == 0.3
    assert advise(_measures(0.29), width=64, length=512) == []
    lines = _measures(0.4)
    lines[1]["value"] = 0.09  # by chance: five times that is more
    assert advise(lines, width=64, length=512) == []


@pytest.mark.parametrize(("rank", "length", "said"), [(12, 65, 0), (1, 65, 1), (12, 2048, 1)])
def test_a_rank_is_judged_by_what_its_texts_allow(rank, length, said):
    """Texts of 65 tokens have a rank of 64 without their first, however wide the model is."""
    lines = [{"metric": "effective_rank_without_first", "layer": 3, "value": rank}]
    found = advise(lines, width=1024, length=length)
    assert ["rank collapse" in one["finding"] for one in found] == [True] * said


def test_a_model_with_a_null_key_is_not_told_to_take_one():
    first, floor, *_ = _measures(0.5)  # a null key of either map of a difference is one
    null = {"metric": "null_mass", "map": "map 1", "value": 0.2}
    difference = [first | {"map": "difference"}, floor, null]
    for lines in (_measures(0.46, null_mass=0.17), _measures(0.46, prefix_mass=0.17), difference):
        (found,) = advise(lines, width=64, length=512)
        assert "beside the null key" in found["finding"]
        assert "softmax1" not in found["advice"]


REPARAMETRISED = {"values": "reparametrised", "projections": "reparametrised", "value_gain": 0.2}
# {layer: (α, β) of the values, (α, β) of the projections}
GAINS = {0: ((2.0, -1.0), (1.0, 0.25)), 1: ((-4.0, 0.5), (0.5, 0.5)), 2: ((1.0, 0.0), (-1.0, -3.0))}


@pytest.mark.parametrize("preset", ["sas", "transformer", ENCODERS[1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gain_ratios_by_hand(tiny, preset, dtype):
    model = tiny.ours(preset, **REPARAMETRISED, num_key_value_heads=4).to(dtype)
    state = {name.removeprefix("model."): one for name, one in model.state_dict().items()}
    for layer, pairs in GAINS.items():
        for part, (alpha, beta) in zip(("v_proj", "o_proj"), pairs, strict=True):
            state[f"layers.{layer}.self_attn.{part}.alpha"].fill_(alpha)
            state[f"layers.{layer}.self_attn.{part}.beta"].fill_(beta)
    lines = gain_ratios(model)
    for part, expected in (("values", [0.5, 0.125, 0.0]), ("projections", [0.25, 1.0, 3.0])):
        found = [tiny.value(lines, f"beta_over_alpha_{part}", layer=n) for n in range(3)]
        assert found == expected
    # All but the first layer's values.
    assert tiny.value(lines, "beta_over_alpha") == (0.125 + 0.0 + 0.25 + 1.0 + 3.0) / 5
    assert len(lines) == 7


def test_other_models_have_no_such_number_and_sas_only_the_first_layers_values(tiny):
    (line,) = gain_ratios(tiny.ours("sas"))
    assert line == {"metric": "beta_over_alpha_values", "layer": 0, "value": 1.0}
    for name in ("transformer", "skipless", "Llama", "Mamba", "BERT"):
        assert gain_ratios(make(name)) == []
