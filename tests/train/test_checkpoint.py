import pytest
import torch
from transformers import AutoModelForCausalLM

from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer
from clearhead.train import checkpoint
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


def save(output, trained, step=2, keep=2):
    model, optimizer = trained
    record = {"step": step, "model": {"id2label": {10: "b", 9: "a"}}}
    return checkpoint.save(
        output, model=model, tokenizer=None, optimizer=optimizer, record=record, keep=keep
    )


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


@pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_file_is_named_with_the_remedy(trained, tmp_path, name, damage):
    save(tmp_path, trained, 2)
    path = save(tmp_path, trained, 4)
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage != "remove":
        end = bytes([content[-1] ^ 1]) if damage == "flip" else b""
        (path / name).write_bytes(content[:-1] + end)
    with pytest.raises(ClearheadError, match=f"{name} is missing, cut short or changed") as caught:
        checkpoint.verify(path)
    assert "to resume from step-00000002" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [100, 50_000])  # configuration, weights
def test_a_full_disk_leaves_the_checkpoint_before(trained, tmp_path, room, size):
    before = save(tmp_path, trained, 2)
    with room(size), pytest.raises(ClearheadError, match="File too large") as caught:
        save(tmp_path, trained, 4, keep=1)
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
