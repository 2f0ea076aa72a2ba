"""What changes with training beside the weights, in every loop; kept by checkpoints."""

import copy
import signal
import warnings

import pytest
import tests_architectures as architectures
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from clearhead import ClearheadError, ClearheadForCausalLM, anneal
from clearhead.train import Callback, train

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
def test_an_annealed_start_is_the_transformer_at_first_and_the_mechanism_at_last(
    name, tiny, tmp_path
):
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

    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2 // passes,
        gradient_accumulation_steps=passes,
        learning_rate=1e-3,
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no"} | settings,
    )
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Courses()]
    )
    return trainer, courses


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
    trainer, courses = _with_trainer(
        whole, tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1
    )
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
