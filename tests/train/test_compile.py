"""Compiled blocks, chosen parameters, adapters, and what changes with training beside weights."""

import copy
import signal
import warnings
from dataclasses import replace
from functools import partialmethod

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from clearhead import ClearheadError, ClearheadForCausalLM, anneal
from clearhead.models.inspection import decoder_layers
from clearhead.train import Callback, train
from clearhead.train.compiling import compiled
from clearhead.train.trainable import choose_parameters


def _backend(monkeypatch, name):
    compile_ = partialmethod(torch.nn.Module.compile, backend=name)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    torch.compiler.reset()


def test_compiled_blocks_train_alike_and_keep_their_names(tiny, tmp_path, monkeypatch):
    """By inductor: tests/models/test_compiled.py."""
    _backend(monkeypatch, "aot_eager")
    losses = {}
    for mode in ("none", "blocks"):
        model = tiny.make_model(attention_dropout=0.0, num_hidden_layers=1)
        names = list(model.state_dict())
        config = tiny.make_config(tokens=3 * 32, compile=mode)
        result = train(model, tiny.Batches(), config, output=tmp_path / mode)
        losses[mode] = result.final_loss
        assert list(result.model.state_dict()) == names
        assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))
    assert losses["blocks"] == pytest.approx(losses["none"], rel=1e-4)


def test_every_model_of_a_process_is_compiled(tiny, monkeypatch):
    _backend(monkeypatch, "eager")  # graphs are what is counted
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=1):
        for made, layer in enumerate(({}, {"num_key_value_heads": 1}), start=1):
            model = tiny.make_model(hidden_size=16, num_hidden_layers=1, **layer)
            with compiled(model, "blocks"):
                model(torch.zeros(1, 4, dtype=torch.int64))
            assert counters["stats"]["unique_graphs"] == before + made
        assert torch._dynamo.config.recompile_limit == 1
    torch.compiler.reset()


def test_a_broken_compiler_is_one_clear_line(tiny, tmp_path, monkeypatch):
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    model = tiny.make_model(hidden_size=16, num_hidden_layers=1)
    config = tiny.make_config(tokens=32, compile="blocks")
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ClearheadError, match=r"torch\.compile does not work here") as caught,
    ):
        train(model, tiny.Batches(), config, output=tmp_path / "run")
    assert "compile none" in str(caught.value)
    assert "\n" not in str(caught.value)
    torch.compiler.reset()


def _trained(tiny, output, model=None, **settings):
    model = tiny.make_model() if model is None else model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, tiny.Batches(), replace(tiny.make_config(), **settings), output=output)
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}, before


@pytest.mark.parametrize("optimizer", ["adamw", "orthoadam", "muon", "sgd"])
def test_only_what_is_named_changes(tiny, tmp_path, optimizer):
    changed, before = _trained(tiny, tmp_path / "run", optimizer=optimizer, only=("*self_attn*",))
    assert changed == {name for name in before if "self_attn" in name}


def test_what_is_frozen_stays_layer_by_layer(tiny, tmp_path):
    patterns = {"only": ("*.layers.*",), "freeze": ("*.layers.0.*", "*norm*")}
    changed, before = _trained(tiny, tmp_path / "run", **patterns)
    assert changed == {n for n in before if ".layers.1." in n and "norm" not in n}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"only": ("*atn*",)}, r"the pattern '\*atn\*' decides no parameter"),
        ({"only": ("*self_attn*",), "freeze": ("*mlp*",)}, "'[*]mlp[*]' decides no parameter"),
        ({"freeze": ("*",)}, "nothing is left to train"),
        ({"lora": 2, "only": ("*norm*",)}, r"lora trains linear layers, and \*norm\* leaves none"),
        ({"lora": 2, "only": ("*q_proj*", "*embed*")}, r"and \*embed\* leaves none"),
    ],
)
def test_patterns_that_decide_nothing_or_leave_nothing_are_refused(tiny, tmp_path, settings, said):
    with pytest.raises(ClearheadError, match=said):
        _trained(tiny, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


MODELS = {
    "llama": lambda tiny: tiny.make_model(),
    "gpt2": lambda tiny: architectures.make("GPT-2"),
    "ours": lambda tiny: architectures.make("softmax1", annealed_start=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_trained_alone_and_merged_at_the_end(tiny, tmp_path, kind):
    peft = pytest.importorskip("peft")
    if not architectures.takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    torch.manual_seed(5)
    model = MODELS[kind](tiny)
    _, before = _trained(tiny, tmp_path / "run", model, lora=2, only=("*attn*",))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {n for n in before if "attn" in n and n.endswith("weight")}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 2
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").eval()
    ids = tiny.Batches().batch(0)["input_ids"]
    assert torch.equal(final(ids).logits, model(ids).logits)

    adapter = tmp_path / "run/final/adapter"
    files = sorted(path.name for path in adapter.iterdir() if path.suffix != ".md")
    assert "adapter_model.safetensors" in files
    assert not [name for name in files if name.endswith(".bin")]
    start = MODELS[kind](tiny)
    start.load_state_dict(before, strict=False)
    for name, buffer in start.named_buffers():
        buffer.copy_(dict(model.named_buffers())[name])
    beside = peft.PeftModel.from_pretrained(start, adapter).eval()
    assert torch.allclose(beside(input_ids=ids).logits, model(ids).logits, atol=1e-5)
    (shard,) = (tmp_path / "run/checkpoints/step-00000012").glob("shard-*")
    weights = {name for name in load_file(shard) if name.startswith("model/")}
    assert any(".lora_" in name for name in weights)
    assert not weights & {f"model/{name}" for name in before}


def test_parameters_frozen_before_stay_frozen(tiny):
    model = tiny.make_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    choose_parameters(model, tiny.make_config())
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.model.norm.weight.requires_grad


KINDS = ["softmax1", "sink", "key-bias", "xsa"]


def _model(name: str, annealed: bool = True) -> ClearheadForCausalLM:
    torch.manual_seed(3)
    return architectures.make(name, initializer_range=0.02, annealed_start=annealed)


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


def _plain(model: ClearheadForCausalLM, name: str) -> ClearheadForCausalLM:
    plain = _model(name, annealed=False)
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain


@pytest.mark.parametrize("name", KINDS)
def test_an_annealed_start_is_at_first_the_transformer_and_then_the_mechanism(name, tiny, tmp_path):
    ids, model = tiny.Batches().batch(0)["input_ids"], _model(name).eval()
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
    model = _model("softmax1")
    normalizer = model.model.layers[0].self_attn.normalizer
    assert normalizer.offset.item() == -40
    stop = [tiny.SignalAt(3, signal.SIGTERM)]
    config = tiny.make_config(learning_rate=1e-3)
    train(model, tiny.Batches(), config, output=tmp_path / "run", callbacks=stop)
    assert normalizer.offset.item() == pytest.approx(-40 * (9 / 12) ** 2)


STEPS = 4
ROWS = torch.randint(0, 61, (2 * STEPS, 16), generator=torch.Generator().manual_seed(5))


def _own_loop(model, steps=range(STEPS), passes=1, optimizers=(torch.optim.AdamW,), planned=STEPS):
    """Buffers after each step of `passes` micro-batches, with evaluation in between."""
    optimizers = [each(model.parameters(), lr=1e-3) for each in optimizers]
    if planned:
        anneal(model, optimizers[0], planned, first_step=steps[0])
    courses = []
    for step in steps:
        model.train()
        for part in ROWS[2 * step : 2 * step + 2].chunk(passes):
            (model(part, labels=part).loss / passes).backward()
        with torch.no_grad():
            model.eval()(ROWS, labels=ROWS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        courses.append(_buffers(model))
    return courses


def _with_trainer(model, folder, passes=1, **settings):
    courses = []

    class Courses(TrainerCallback):
        def on_step_end(self, args, state, control, model, **others):
            courses.append(_buffers(model))

    batches = {"per_device_train_batch_size": 2 // passes, "gradient_accumulation_steps": passes}
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    usual = {"max_steps": STEPS, "learning_rate": 1e-3, "train_sampling_strategy": "sequential"}
    arguments = TrainingArguments(str(folder), **usual | batches | quiet | settings)
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    data = {"train_dataset": rows, "eval_dataset": rows}
    return Trainer(model, arguments, **data, callbacks=[Courses()]), courses


class Courses(Callback):
    def start(self, run):
        self.model, self.courses = run.model, []

    def step(self, metrics):
        self.courses.append(_buffers(self.model))


def _close(courses, wanted):
    assert len(courses) == len(wanted)
    for course, expected in zip(courses, wanted, strict=True):
        assert course.keys() == expected.keys()
        for name, value in course.items():
            assert value == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_training_loop_moves_the_parts_alike(kind, tiny, tmp_path):
    ours, config = Courses(), tiny.make_config(learning_rate=1e-3, tokens=STEPS * 2 * 16)
    train(_model(kind), tiny.Batches(), config, output=tmp_path / "run", callbacks=[ours])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for passes in (1, 2):
            _close(_own_loop(copy.deepcopy(_model(kind)), passes=passes), ours.courses)
            trainer, courses = _with_trainer(_model(kind), tmp_path / "trainer", passes)
            trainer.train()
            _close(courses, ours.courses)
        both = [torch.optim.SGD, torch.optim.AdamW]
        _close(_own_loop(_model(kind), optimizers=both), ours.courses)


@pytest.mark.parametrize("kind", ["softmax1", "xsa"])
def test_a_training_that_goes_on_is_the_unbroken_one(kind, tmp_path):
    whole = _model(kind)
    saves = {"save_strategy": "steps", "save_steps": 2}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1}
    trainer, courses = _with_trainer(whole, tmp_path, **saves, **evaluates)
    trainer.train()
    trainer, rest = _with_trainer(_model(kind), tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest == courses[2:]
    state = trainer.model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in whole.state_dict().items())
    model = _model(kind)
    first = _own_loop(model, range(2))
    resumed = _model(kind)
    resumed.load_state_dict(model.state_dict())
    _close([*first, *_own_loop(resumed, range(2, STEPS))], courses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_says_no_number_of_steps_is_warned_of_once(kind):
    model = _model(kind)
    started = _buffers(model)
    with pytest.warns(UserWarning, match=r"clearhead\.anneal\(model, optimizer, steps") as caught:
        assert _own_loop(model, planned=None)[-1] == started
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        arrived = _own_loop(model)[-1]
        assert arrived != started
        again = copy.deepcopy(model)
        again.model.followed = False
        assert _own_loop(again, planned=None)[-1] == arrived  # nothing is left to say


@pytest.mark.parametrize(("steps", "first_step"), [(0, 0), (4, 4), (4, -1)])
def test_steps_that_do_not_fit_are_refused(steps, first_step):
    model = _model("softmax1")
    with pytest.raises(ClearheadError, match="steps is"):
        anneal(model, torch.optim.SGD(model.parameters()), steps, first_step=first_step)
    model = _model("softmax1", annealed=False)
    with pytest.raises(ClearheadError, match="no part that training moves"):
        anneal(model, torch.optim.SGD(model.parameters()), 4)
