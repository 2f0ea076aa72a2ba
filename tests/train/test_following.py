"""What changes with training beside the weights: told after every step, kept by checkpoints."""

import signal

import pytest
import torch

from clearhead import ClearheadError, ClearheadForCausalLM, preset
from clearhead.nn.gains import Feedback
from clearhead.train import train

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
KINDS = {
    "annealed": ("transformer", {"shaping": "annealed"}),
    "softmax-1": ("softmax1", {"annealed_start": True}),
    "sink": ("sink", {"annealed_start": True}),
    "key": ("key-bias", {"annealed_start": True}),
    "xsa": ("xsa", {"annealed_start": True}),
    "scheduled": (
        "sas-p-nonorm",
        {"residual_scale": "scheduled", "attention_gain": None, "mlp_gain": 0.1},
    ),
    "feedback": ("sas-p-nonorm", {"residual_scale": "feedback"}),
}


def _model(kind: str) -> ClearheadForCausalLM:
    name, keys = KINDS[kind]
    torch.manual_seed(3)
    return ClearheadForCausalLM(preset(name, **SHAPE | keys))


def _buffers(model: ClearheadForCausalLM) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(kind, tiny, tmp_path):
    config = tiny.make_config(learning_rate=1e-3)
    whole = _model(kind)
    started = _buffers(whole)
    train(whole, tiny.Batches(), config, output=tmp_path / "whole")
    assert _buffers(whole) != started
    stop = [tiny.SignalAt(5, signal.SIGTERM)]
    first = train(_model(kind), tiny.Batches(), config, output=tmp_path / "cut", callbacks=stop)
    assert first.steps == 5
    assert _buffers(first.model) != _buffers(whole)
    resumed = _model(kind)
    train(resumed, tiny.Batches(), config, output=tmp_path / "cut", resume=True)
    state = resumed.state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    loaded = ClearheadForCausalLM.from_pretrained(tmp_path / "cut" / "final")
    assert _buffers(loaded) == _buffers(whole)


def test_an_annealed_run_ends_as_plain_attention(tiny, tmp_path):
    model = _model("annealed")
    attention = model.model.layers[0].self_attn
    assert attention.shaping.identity.item() == 1
    train(model, tiny.Batches(), tiny.make_config(learning_rate=1e-3), output=tmp_path / "run")
    assert attention.shaping.identity.item() == 0
    ids = tiny.Batches().batch(0)["input_ids"]
    assert torch.equal(model(ids).logits, _plain(model, "transformer")(ids).logits)


def _plain(model: ClearheadForCausalLM, name: str) -> ClearheadForCausalLM:
    plain = ClearheadForCausalLM(preset(name, **SHAPE)).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain


@pytest.mark.parametrize("name", ["softmax1", "sink", "key-bias", "xsa"])
def test_an_annealed_start_is_the_transformer_at_first_and_the_mechanism_at_last(
    name, tiny, tmp_path
):
    ids = tiny.Batches().batch(0)["input_ids"]
    torch.manual_seed(3)
    model = ClearheadForCausalLM(preset(name, **SHAPE, annealed_start=True)).eval()
    wanted = _plain(model, "transformer")(ids).logits
    assert (model(ids).logits - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    config = tiny.make_config(learning_rate=1e-3)
    train(model, tiny.Batches(), config, output=tmp_path / "run")
    assert torch.allclose(model(ids).logits, _plain(model, name)(ids).logits, atol=1e-6)
    # A model whose mechanism has arrived keeps it in a training that follows.
    after = {key: buffer.clone() for key, buffer in model.named_buffers()}
    train(model, tiny.Batches(), config, output=tmp_path / "again")
    assert all(torch.equal(buffer, after[key]) for key, buffer in model.named_buffers())


def test_the_null_rises_by_the_square_of_what_is_left(tiny, tmp_path):
    torch.manual_seed(3)
    model = ClearheadForCausalLM(preset("softmax1", **SHAPE, annealed_start=True))
    normalizer = model.model.layers[0].self_attn.normalizer
    assert normalizer.offset.item() == -40
    stop = [tiny.SignalAt(3, signal.SIGTERM)]
    config = tiny.make_config(learning_rate=1e-3)
    train(model, tiny.Batches(), config, output=tmp_path / "run", callbacks=stop)
    assert normalizer.offset.item() == pytest.approx(-40 * (9 / 12) ** 2)


def test_the_scheduled_gain_is_in_proportion_to_what_is_done(tiny, tmp_path):
    model = _model("scheduled")
    gain = model.model.layers[1].mlp_gain
    assert gain.gain.item() == 0
    config = tiny.make_config(learning_rate=1e-3)
    stop = [tiny.SignalAt(3, signal.SIGTERM)]
    train(model, tiny.Batches(), config, output=tmp_path / "run", callbacks=stop)
    assert gain.gain.item() == pytest.approx(0.1 * 3 / 12)


@pytest.mark.parametrize("kind", ["annealed", "scheduled"])
def test_a_training_that_follows_begins_no_branch_anew(kind, tiny, tmp_path):
    model, config = _model(kind), tiny.make_config(learning_rate=1e-3)
    train(model, tiny.Batches(), config, output=tmp_path / "run")
    arrived = _buffers(model)
    stop = [tiny.SignalAt(3, signal.SIGTERM)]
    train(model, tiny.Batches(), config, output=tmp_path / "again", callbacks=stop)
    assert _buffers(model) == arrived


def test_a_training_that_follows_takes_the_mean_of_its_own_losses(tiny, tmp_path):
    model, config = _model("feedback"), tiny.make_config(learning_rate=1e-3)
    train(model, tiny.Batches(), config, output=tmp_path / "run")
    gain = model.model.layers[1].mlp_gain
    grown, seen = gain.gain.item(), gain.loss[0].item()
    assert seen == 12
    stop = [tiny.SignalAt(3, signal.SIGTERM)]
    train(model, tiny.Batches(), config, output=tmp_path / "again", callbacks=stop)
    assert gain.loss[0].item() == 3
    assert gain.gain.item() == pytest.approx(grown * 1.001**3)


def test_feedback_shrinks_at_a_leap_and_grows_elsewhere_within_bounds():
    gain = Feedback(0.1)
    torch.manual_seed(0)
    for noise in torch.randn(300).tolist():
        gain.on_step_end(0.0, 3 + 0.01 * noise)
    grown = gain.gain.item()
    assert 0.1 < grown < 0.1 * 1.001**300
    gain.on_step_end(0.0, 9.0)
    assert gain.gain.item() == pytest.approx(0.9 * grown)
    for _ in range(5000):
        gain.on_step_end(0.0, 3.0)
    assert gain.gain.item() == pytest.approx(1.0)


def test_a_norm_free_run_that_diverges_stops_with_advice(tiny, tmp_path):
    torch.manual_seed(3)
    model = ClearheadForCausalLM(preset("sas-p-nonorm", **SHAPE))
    config = tiny.make_config(learning_rate=1e6, warmup=0.0, clip=0.0)
    with pytest.raises(ClearheadError, match="with a lower learning_rate"):
        train(model, tiny.Batches(), config, output=tmp_path / "run")
