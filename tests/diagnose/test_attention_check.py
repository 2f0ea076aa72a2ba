"""Implementations of attention against exact answers: right ones, and ones broken on purpose."""

import pytest
import tests_architectures as architectures
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GraniteSWAConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import repeat_kv

from clearhead.diagnose.attention_check import WAYS, check_attention, in_words
from clearhead.errors import ClearheadError

SHAPE = architectures.SHAPE | {"hidden_size": 32, "num_key_value_heads": 2, "head_dim": 8}
SHAPE |= {"max_position_embeddings": 64, "initializer_range": 0.3}


def _model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def _granite():
    return _model(GraniteSWAConfig(**SHAPE, sliding_window=8))


def broken(name, fault):
    """Register eager attention with one fault."""

    def attend(module, q, k, v, mask, scaling, dropout=0.0, s_aux=None, **options):
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = q @ k.mT * scaling
        if fault == "padding":  # every key up to a query's own
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
            scores = scores.masked_fill(hidden, -1e9)
        elif mask is not None:
            scores = scores + mask
        if s_aux is None or fault == "sink":
            return (scores.softmax(-1) @ v).transpose(1, 2), None
        sink = s_aux.view(1, -1, 1)
        lse = scores.logsumexp(-1)
        if fault == "gradient":
            lse = lse.detach()
        o = (scores.softmax(-1) @ v) * torch.sigmoid(lse - sink)[..., None]
        return o.transpose(1, 2), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    return name


def _cases(found):
    return {case.name: case for case in found.cases}


def test_sinks_are_honoured_by_clearhead_and_by_eager():
    model = _granite()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    eager, ours = check_attention(model, ("eager", "clearhead"), timed=16)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.config.sliding_window == 8
    (_, line), ratio = in_words([eager, ours]), ours.seconds / ours.eager_seconds
    assert line.endswith(f"; {1e3 * ours.seconds:.3g} ms, {ratio:.2f} of eager's")
    for one in (eager, ours):
        assert [case.name for case in one.cases if case.right] == [*WAYS][:-1]  # but compiled
        assert one.seconds > 0
        assert all(case.gradient is not None for case in one.cases if "cached" not in case.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dropped_sink_is_named(dtype):
    (found,) = check_attention(_granite(), (broken("drops", "sink"),), dtype=dtype, timed=0)
    case = _cases(found)["sinks of 20"]
    assert case.output > 0.2
    assert not case.right


def test_a_gradient_that_misses_the_log_sum_exp_is_named():
    (found,) = check_attention(_granite(), (broken("detached", "gradient"),), timed=0)
    case = _cases(found)["plain"]
    assert case.right is False
    assert case.output < 1e-5 < case.gradient
    assert "log-sum-exp" in case.what
    assert "k_proj" in case.what


def test_padding_that_is_seen_and_an_ignored_window_are_named():
    (found,) = check_attention(_model(LlamaConfig(**SHAPE)), (broken("sees", "padding"),), timed=0)
    cases = _cases(found)
    assert cases["plain"].right
    assert [case.name for case in found.wrong] == ["padded", "packed"]
    (line,) = in_words([found])
    assert line.startswith("sees: right: plain, cached, chunks; WRONG: padded (")
    (found,) = check_attention(_granite(), (broken("far", "padding"),), timed=0)
    assert not _cases(found)["windowed"].right


def test_sinks_in_some_layers():
    config = MiMoV2FlashConfig(**SHAPE, sliding_window=8, num_local_experts=2)
    found = check_attention(_model(config), ("eager", "clearhead"), timed=0)
    assert [one.wrong for one in found] == [(), ()]
    assert "sinks of 20" in _cases(found[1])


@pytest.mark.parametrize("preset", ["sink", "differential", "coca", "sas-p"])
def test_our_presets(preset):
    (found,) = check_attention(architectures.make(preset), ("sdpa",), timed=0)
    assert {case.name: case.what for case in found.cases if not case.right} == {}


def test_an_encoder_and_a_name_that_does_not_load():
    model = architectures.make("BERT")
    sdpa, flash = check_attention(model, ("sdpa", "flash_attention_3"), timed=0)
    assert [case.name for case in sdpa.cases if case.right] == ["plain", "padded"]
    assert flash.lacks
    assert "does not load here" in in_words([flash])[0]


def test_a_model_without_the_interface_is_refused():
    with pytest.raises(ClearheadError, match="cannot be switched"):
        check_attention(torch.nn.Linear(2, 2))
