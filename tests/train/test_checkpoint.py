import json
import resource
from threading import Event

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer
from clearhead.train import Callback, checkpoint, train
from clearhead.train.saver import Saver
from clearhead.train.world import ALONE
from tests.cli.conftest import call, refusal


@pytest.fixture
def trained(tiny):
    """A model and its optimizer after two steps."""
    model = tiny.make_model()
    optimizer = build_optimizer(model, tiny.make_config())
    for step in range(2):
        model(**tiny.Batches().batch(step)).loss.backward()
        optimizer.step()
    return model, optimizer


def save(output, trained, step=2, keep=2, last=True):
    model, optimizer = trained
    record = {"step": step, "model": {"id2label": {10: "b", 9: "a"}}}
    saver = Saver(ALONE)
    checkpoint.save(
        output, model=model, tokenizer=None, optimizer=optimizer, record=record, keep=keep,
        saver=saver, last=last,
    )  # fmt: skip
    saver.finish()
    return saver.published()


def test_weights_optimizer_and_random_state_come_back(tiny, trained, tmp_path):
    model, optimizer = trained
    path = save(tmp_path, trained)
    expected = torch.rand(3)
    other = tiny.make_model()
    other_optimizer = build_optimizer(other, tiny.make_config())
    torch.manual_seed(99)
    assert checkpoint.verify(path)["step"] == 2
    checkpoint.restore(path, other, other_optimizer)
    assert torch.equal(torch.rand(3), expected)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        mine, its = optimizer.state[ours], other_optimizer.state[theirs]
        assert mine.keys() == its.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[key], its[key]) for key in mine)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_the_folder_becomes_an_ordinary_model_and_has_no_pickles(trained, tmp_path, capsys):
    path = save(tmp_path, trained)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    said = refusal(capsys, "diagnose", path, "--data.data", path)
    assert f"make a model of it by clearhead convert {path} FOLDER" in said
    assert call("convert", path, tmp_path / "model") == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(8)[None]
    assert torch.equal(again.eval()(tokens).logits, trained[0].eval()(tokens).logits)


def test_a_checkpoint_written_beside_the_training_is_of_the_step_it_is_named_for(trained, tmp_path):
    expected = save(tmp_path / "whole", trained)
    model, optimizer = trained
    go_on = Event()

    class Late(Saver):
        def start(self, write, *, beside):
            assert beside
            super().start(lambda: go_on.wait(10) and write(), beside=True)

    saver = Late(ALONE)
    checkpoint.save(
        tmp_path, model=model, tokenizer=None, optimizer=optimizer, keep=2, last=False,
        record={"step": 2, "model": {"id2label": {10: "b", 9: "a"}}}, saver=saver,
    )  # fmt: skip
    optimizer.step()
    torch.rand(3)
    assert checkpoint.newest(tmp_path) is None
    go_on.set()
    saver.finish()
    path = saver.published()
    assert {file.name for file in path.iterdir()} == {file.name for file in expected.iterdir()}
    (shard,) = path.glob("shard-*")
    before = load_file(expected / shard.name)
    assert {name: tensor.tolist() for name, tensor in load_file(shard).items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }
    assert (path / "config.json").read_bytes() == (expected / "config.json").read_bytes()


class Faults(Callback):
    """Counts the pages of memory that the training thread took new from a step to the next."""

    def __init__(self):
        self.ended, self.began = [], []

    def start(self, run):
        run.model.register_forward_pre_hook(lambda *_: self.began.append(self.count()))

    def step(self, metrics):
        self.ended.append(self.count())

    def count(self):
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_the_first_checkpoint_finds_the_memory_of_its_copies_in_use(tiny, tmp_path):
    model = tiny.make_model(hidden_size=256, intermediate_size=4096)
    faults = Faults()
    settings = tiny.make_config(save_every=3, log_every=1)
    train(model, tiny.Batches(), settings, output=tmp_path, callbacks=[faults])
    saving = faults.began[3] - faults.ended[2]
    state = 3 * sum(parameter.nbytes for parameter in model.parameters())  # with two moments
    assert saving * resource.getpagesize() < state / 10


def test_the_newest_stay(trained, tmp_path):
    for step in (2, 10, 100):
        save(tmp_path, trained, step)
    assert [path.name for path in checkpoint.folders(tmp_path)] == [
        "step-00000010",
        "step-00000100",
    ]


@pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_file_is_named_with_the_remedy(trained, tmp_path, name, damage):
    save(tmp_path, trained, 2)
    path = save(tmp_path, trained, 4)
    content = (path / name).read_bytes()
    if damage == "remove":
        (path / name).unlink()
    elif damage == "cut":
        (path / name).write_bytes(content[:-1])
    else:
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ClearheadError, match=f"{name} is missing, cut short or changed") as caught:
        checkpoint.verify(path)
    assert "to resume from step-00000002" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "edit", "remove", "list"])
def test_trainer_json_vouches_for_itself(trained, tmp_path, damage):
    path = save(tmp_path, trained) / "trainer.json"
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_text(path.read_text()[:-20])
    elif damage == "list":
        path.write_text("[]")
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "step": 3}))
    with pytest.raises(ClearheadError, match=r"trainer\.json is missing.* from the first step"):
        checkpoint.verify(path.parent)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("size", [100, 50_000])  # configuration, weights
def test_a_full_disk_leaves_the_checkpoint_before(trained, tmp_path, room, size, last):
    before = save(tmp_path, trained, 2)
    with room(size), pytest.raises(ClearheadError, match="File too large") as caught:
        save(tmp_path, trained, 4, keep=1, last=last)
    assert f"{before}, is whole" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    checkpoint.verify(before)
    save(tmp_path, trained, 4)


def test_other_folders_are_neither_counted_nor_removed(trained, tmp_path):
    mine = ["step-00000002-mybackup", "step-00000009 (copy)", "step-9", "step-000000012", "notes"]
    for name in mine:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for step in (2, 4, 6, 123_456_789):
        save(tmp_path, trained, step)
    assert [path.name for path in checkpoint.folders(tmp_path)] == [
        "step-00000006",
        "step-123456789",
    ]
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {*mine, "step-00000006", "step-123456789"}


def test_a_file_that_was_not_written_with_the_checkpoint_is_refused(trained, tmp_path):
    path = save(tmp_path, trained)
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ClearheadError, match=r"adapter_config\.json was not there when .*: delete"):
        checkpoint.verify(path)
