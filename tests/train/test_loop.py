import json
import math
import signal

import pytest
import torch
from transformers import LlamaForCausalLM

from clearhead import ClearheadForCausalLM, ClearheadForSequenceClassification, preset
from clearhead.errors import ClearheadError
from clearhead.records import jsonl
from clearhead.train import Callback, is_finished, train
from clearhead.train.parallel import accumulate, label_count


class Recorder(Callback):
    def __init__(self):
        self.metrics = []
        self.events = []

    def start(self, run):
        self.events.append(("start", run.first_step, run.steps))

    def step(self, metrics):
        self.metrics.append(metrics)

    def checkpoint(self, path):
        self.events.append(("checkpoint", path.name))

    def end(self, result):
        self.events.append(("end", result.steps))

    def close(self):
        self.events.append("close")


def masked(batch, *labels):
    """`batch` with only so many labels left in each row."""
    batch = {key: tensor.clone() for key, tensor in batch.items()}
    for row, count in enumerate(labels):
        batch["labels"][row, 1 + count :] = -100
    return batch


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("labels", [[15, 15, 15, 15], [15, 3, 1, 9], [7, 2, 0, 0]])
def test_an_accumulated_step_is_that_of_the_big_batch(tiny, labels):
    model = tiny.make_model(attention_dropout=0.0)
    parts = enumerate((labels[:2], labels[2:]))
    micro = [masked(tiny.Batches().batch(number), *counts) for number, counts in parts]
    big = {key: torch.cat([batch[key] for batch in micro]) for key in micro[0]}
    loss = accumulate(model, micro, "fp32")
    found = gradients(model)
    model.zero_grad()
    whole = model(**big).loss
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    for ours, theirs in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with pytest.raises(ClearheadError, match="no label"):
        accumulate(model, [masked(micro[0], 0, 0)], "fp32")


def test_a_run_learns_and_writes_its_folder(tiny, tmp_path):
    class Same(tiny.Batches):
        def batch(self, step):
            return super().batch(0)

    recorder = Recorder()
    sizes = {"tokens": 30 * 32, "save_every": 0, "log_every": 7, "accumulation": 1}
    config = tiny.make_config(**sizes, precision="auto")
    output = tmp_path / "run"
    result = train(
        tiny.make_model(), Same(), config, output=output, callbacks=[recorder],
        description={"run": "llama/seed0", "preset": "llama"},
    )  # fmt: skip
    assert [metrics.step for metrics in recorder.metrics] == [7, 14, 21, 28, 30]
    saved = "checkpoint", "step-00000030"
    assert recorder.events == [("start", 0, 30), saved, ("end", 30), "close"]
    assert result.final_loss == recorder.metrics[-1].loss < 0.5 * recorder.metrics[0].loss
    assert (result.steps, result.tokens, result.interrupted) == (30, 960, False)
    assert result.tokens_per_second == pytest.approx(960 / result.seconds)
    assert 2**24 < result.peak_memory_bytes < 2**36
    assert not result.model.training
    assert recorder.metrics[-1].seconds_left == 0
    assert is_finished(output)
    names = {"checkpoints", "final", "metrics.jsonl", "run.json"}
    assert {path.name for path in output.iterdir()} == names
    lines = jsonl.steps(output / "metrics.jsonl")
    assert set(lines[0]) == {
        "kind", "run", "step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm",
        "tokens_per_second", "batch_stall",
    }  # fmt: skip
    assert (lines[0]["kind"], lines[0]["run"], lines[0]["tokens"]) == ("step", "llama/seed0", 224)
    text = (output / "run.json").read_text()
    record = json.loads(text)
    assert record["config"]["precision"] in ("bf16", "fp32")
    assert record["config"]["betas"] == [0.9, 0.95]
    assert record["model"]["hidden_size"] == 32
    assert (record["run"], record["seed"], record["data"]) == ("llama/seed0", 0, "tiny")
    assert {"python", "clearhead", "torch", "tokenizers"} <= set(record["versions"])
    assert record["threads"] == torch.get_num_threads()
    assert record["parameters"] > 0
    assert record["date"].endswith("+00:00")
    assert str(tmp_path) not in text  # nothing of the machine's paths


def test_clipping_bounds_the_step_and_reports_the_norm_before(tiny, tmp_path):
    norms = {}
    for clip in (0.0, 1e-6):
        model = tiny.make_model()
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        recorder = Recorder()
        options = {"epsilon": 1.0, "weight_decay": 0.0, "learning_rate": 1.0}
        config = tiny.make_config(tokens=32, clip=clip, **options)
        train(model, tiny.Batches(), config, output=tmp_path / str(clip), callbacks=[recorder])
        moved = (model.model.layers[0].mlp.up_proj.weight.detach() - before).norm().item()
        norms[clip] = (recorder.metrics[0].gradient_norm, moved)
    assert norms[0.0][0] == pytest.approx(norms[1e-6][0])
    assert norms[1e-6][1] < 1e-3 * norms[0.0][1]


def test_half_precision_weights_are_trained_in_float32(tiny, tmp_path):
    model = tiny.make_model().to(torch.bfloat16)
    train(model, tiny.Batches(), tiny.make_config(tokens=32), output=tmp_path / "run")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Poisoned(LlamaForCausalLM):
    """Its loss, or only its gradient, is not finite in the seventh forward pass."""

    def forward(self, *args, use_cache=None, **kwargs):
        output = super().forward(*args, use_cache=use_cache, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 7:
            zero = output.logits.sum() * 0
            output.loss = output.loss + (torch.sqrt(zero) if self.poison == "gradient" else zero)
            if self.poison == "loss":
                output.loss = output.loss * math.nan
        return output


@pytest.mark.parametrize(
    ("poison", "what"), [("loss", "the loss is nan"), ("gradient", "the gradient's norm is nan")]
)
def test_nan_stops_the_run_and_the_last_good_checkpoint_stays(tiny, tmp_path, poison, what):
    model = Poisoned(tiny.make_model().config)
    model.poison = poison
    recorder, config, run = Recorder(), tiny.make_config(), tmp_path / "run"
    with pytest.raises(ClearheadError, match=f"stopped at step 7: {what}") as caught:
        train(model, tiny.Batches(), config, output=run, callbacks=[recorder])
    checkpoints = run / "checkpoints"
    message = str(caught.value)
    assert f"the last finite loss was {recorder.metrics[-1].loss:.4f}" in message
    assert f"the last good checkpoint is {checkpoints / 'step-00000004'}" in message
    assert "lower learning_rate (it is 0.01) or a longer warmup" in message
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert recorder.events[-1] == "close"


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path):
    class Breaker(Callback):
        def start(self, run):
            self.model = run.model

        def step(self, metrics):
            if metrics.step == 8:
                self.model.model.norm.weight.data.fill_(math.inf)

    config, breaks = tiny.make_config(), [Breaker()]
    with pytest.raises(ClearheadError, match="step 8: some weights are no longer finite"):
        train(tiny.make_model(), tiny.Batches(), config, output=tmp_path / "run", callbacks=breaks)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


def test_every_hidden_token_counts_in_masked_training(tiny):
    """Also one at a row's start, which is no one's next token."""
    model, batches = tiny.make_masked_model(), tiny.make_masked_batches(tiny.Batches())
    model.eval()  # no dropout; in evaluation the loss is the same
    micro = [batches.batch(0), batches.batch(1)]
    micro[0]["labels"][:, 0] = micro[0]["input_ids"][:, 0]
    big = {key: torch.cat([batch[key] for batch in micro]) for key in micro[0]}
    loss = accumulate(model, micro, "fp32", "mlm")
    torch.testing.assert_close(loss, model(**big).loss.detach())


def test_labels_of_another_objective_are_refused(tiny, tmp_path):
    for model, batches in (
        (tiny.make_masked_model(), tiny.Batches()),
        (ClearheadForCausalLM(preset("transformer")), tiny.make_masked_batches(tiny.Batches())),
    ):
        with pytest.raises(ClearheadError, match="but the labels of the batches are for"):
            train(model, batches, tiny.make_config(), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Texts:
    """A label a text, of two texts and of one in turn, none as long as it may be."""

    objective = "classification"

    def batch(self, step):
        ids = torch.arange(9 * (2 - step % 2)).view(-1, 9)
        return {"input_ids": ids, "labels": ids[:, 0] % 2}


def test_labelled_texts_may_be_fewer_and_shorter_than_the_settings_but_not_more(tiny, tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ClearheadForSequenceClassification(preset("bert", vocab_size=61, **shape))
    config = tiny.make_config(tokens=4 * 2 * 16)
    result = train(model, Texts(), config, output=tmp_path / "run")
    assert result.steps == 4
    assert math.isfinite(result.final_loss)
    for settings in ({"batch_size": 1}, {"sequence_length": 8}):
        with pytest.raises(ClearheadError, match="batches are 2 x 9 tokens"):
            train(model, Texts(), tiny.make_config(**settings), output=tmp_path / "other")
    with pytest.raises(ClearheadError, match="learns classification, but the labels"):
        train(model, tiny.Batches(), config, output=tmp_path / "other")


def test_every_number_is_a_label_of_a_regression():
    assert label_count({"labels": torch.tensor([-100.0, 2.0])}, "classification") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "orthoadam", "muon"])
def test_a_run_goes_on_where_it_stopped(tiny, tmp_path, optimizer):
    """With dropout, so the device's generator counts. The flash kernel adds in no fixed order."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

    def model():
        torch.manual_seed(7)
        config = preset("transformer", vocab_size=tiny.VOCABULARY, dropout=0.3, **shape)
        return ClearheadForCausalLM(config).cuda()

    config = tiny.make_config(optimizer=optimizer)
    train(model(), tiny.Batches(), config, output=tmp_path / "whole")
    parts, stop = tmp_path / "parts", [tiny.SignalAt(6, signal.SIGTERM)]
    stopped = train(model(), tiny.Batches(), config, output=parts, callbacks=stop)
    assert stopped.steps == 6
    torch.cuda.manual_seed(0)
    resumed = train(model(), tiny.Batches(), config, output=parts, resume=True)
    assert resumed.steps == 12
    losses, whole = (
        [line["loss"] for line in jsonl.steps(run / "metrics.jsonl")]
        for run in (parts, tmp_path / "whole")
    )
    assert losses == pytest.approx(whole, rel=1e-4)
    assert resumed.peak_memory_bytes > 0
