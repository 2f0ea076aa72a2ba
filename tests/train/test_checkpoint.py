"""A run that goes on: resumed, extended, or refused before anything is written.

`older_run` was stopped half-way by an older version, commit 45ba971: `clearhead train softmax1
--size tiny --set hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=32
--data.data text.jsonl --train.optimizer orthoadam …`, as its run.json says; `final` is where that
version ended when nothing stopped it.
"""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from clearhead import ClearheadForCausalLM, preset
from clearhead.cli import main
from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer
from clearhead.records import manifest
from clearhead.train import checkpoint, is_finished, train
from clearhead.train.run_dir import refuse_changes
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
    parts = {"model": model, "tokenizer": None, "optimizer": optimizer}
    return checkpoint.save(output, **parts, record=record, keep=keep)


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
def test_a_damaged_file_is_named_with_the_remedy(trained, tmp_path, name):
    save(tmp_path, trained, 2)
    path = save(tmp_path, trained, 4)
    (path / name).write_bytes((path / name).read_bytes()[:-1])
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
    kept = [path.name for path in checkpoint.folders(tmp_path)]
    assert kept == ["step-00000006", "step-123456789"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*mine, *kept}


@pytest.fixture
def stopped(tiny, tmp_path):
    """A run interrupted after step 6."""
    output = tmp_path / "run"
    stop = tiny.SignalAt(6, signal.SIGTERM)
    handler = signal.getsignal(signal.SIGTERM)
    config = tiny.make_config()
    result = train(tiny.make_model(), tiny.Batches(), config, output=output, callbacks=[stop])
    assert result.interrupted
    assert result.steps == 6
    assert signal.getsignal(signal.SIGTERM) is handler
    return output


def again(tiny, output, model=None, batches=None, resume=True, **changes):
    model, batches = model or tiny.make_model(), batches or tiny.Batches()
    config = replace(tiny.make_config(), **changes)
    return train(model, batches, config, output=output, resume=resume)


def test_resuming_with_other_settings_model_or_data_names_each_with_both_values(tiny, stopped):
    with pytest.raises(ClearheadError) as caught:
        again(tiny, stopped, learning_rate=0.5, betas=(0.9, 0.99))
    message = str(caught.value)
    assert "learning_rate was 0.01 and is now 0.5" in message
    assert "betas was [0.9, 0.95] and is now [0.9, 0.99]" in message
    assert "\n" not in message
    with pytest.raises(ClearheadError, match=r"model\.intermediate_size was 48 and is now 64"):
        again(tiny, stopped, model=tiny.make_model(intermediate_size=64))
    other = tiny.Batches()
    other.fingerprint = "other"
    with pytest.raises(ClearheadError, match=r"data\.fingerprint was 'tiny' and is now 'other'"):
        again(tiny, stopped, batches=other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config.pop("betas"), r"betas was None and is now \[0\.9, 0\.95\]"),
        (lambda config: config.update(sides="both"), r"sides was 'both' and is now None"),
    ],
    ids=["one of now", "one of before"],
)
def test_a_setting_that_one_of_two_versions_lacks_differs(tiny, stopped, change, said):
    path = stopped / "checkpoints" / "step-00000006" / "trainer.json"
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record["config"])
    manifest.seal(path.parent, record, name=path.name)
    with pytest.raises(ClearheadError, match=rf"train\.{said}"):
        again(tiny, stopped)


def test_what_changes_no_weight_may_change_and_a_finished_run_says_so(tiny, stopped):
    result = again(tiny, stopped, save_every=5, keep=1, log_every=3)
    assert result.steps == 12
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step-00000012"]
    with pytest.raises(ClearheadError, match=r"is finished: its model is in .*final"):
        again(tiny, stopped)


def test_a_finished_run_is_extended_to_the_bits_of_one_that_was_planned_so(tiny, tmp_path):
    plan = {"schedule_tokens": 12 * 32, "schedule": "linear"}
    for output, tokens in ((tmp_path / "whole", 20 * 32), (tmp_path / "run", 12 * 32)):
        again(tiny, output, resume=False, tokens=tokens, **plan)
    first = (tmp_path / "run/final/model.safetensors").read_bytes()
    with pytest.raises(ClearheadError, match=r"train\.schedule_tokens was 384 and is now 640"):
        again(tiny, tmp_path / "run", tokens=20 * 32, schedule="linear")
    again(tiny, tmp_path / "run", tokens=20 * 32, **plan)
    weights = [tmp_path / run / "final/model.safetensors" for run in ("whole", "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (tmp_path / "run/final-00000012/model.safetensors").read_bytes() == first
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    assert len(rates) == 20
    assert rates[11:] == [pytest.approx(1e-3)] * 9
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["config"]["tokens"] == 20 * 32
    assert [resumed["step"] for resumed in record["resumed"]] == [12]
    with pytest.raises(ClearheadError, match=r"is finished.*extend it by more --train\.tokens"):
        again(tiny, tmp_path / "run", tokens=20 * 32, **plan)


def test_a_resumption_without_a_description_keeps_that_of_the_run(tiny, tmp_path):
    def run(**options):
        train(tiny.make_model(), tiny.Batches(), output=tmp_path / "run", **options)
        return json.loads((tmp_path / "run/run.json").read_text())

    stop = [tiny.SignalAt(5, signal.SIGTERM)]
    said = {"preset": "llama"}
    begun = run(config=tiny.make_config(), description=said, callbacks=stop)
    assert begun["description"] == said
    resumed = run(config=tiny.make_config(save_every=3), resume=True)
    assert (resumed["description"], resumed["command"]) == (said, begun["command"])
    assert resumed["config"]["save_every"] == 3


def test_an_extension_that_is_stopped_anywhere_goes_on(tiny, tmp_path):
    plan, run = {"schedule_tokens": 12 * 32}, tmp_path / "run"
    again(tiny, tmp_path / "whole", resume=False, tokens=20 * 32, **plan)
    again(tiny, run, resume=False)
    more = replace(tiny.make_config(), tokens=20 * 32, **plan)
    for _ in range(2):  # as where it was killed before the model of before was renamed
        stop = [tiny.SignalAt(14, signal.SIGTERM)]
        train(tiny.make_model(), tiny.Batches(), more, output=run, resume=True, callbacks=stop)
        assert not is_finished(run)
        with pytest.raises(ClearheadError, match="has done 14 steps, more than the 13"):
            again(tiny, run, tokens=13 * 32, **plan)
        if (run / "final-00000012").exists():
            (run / "final-00000012").rename(run / "final")
            shutil.rmtree(run / "checkpoints/step-00000014")
    again(tiny, run, tokens=20 * 32, **plan)
    weights = [tmp_path / name / "final/model.safetensors" for name in ("whole", "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_folder_with_a_run_needs_resume_and_resume_needs_a_run(tiny, stopped, tmp_path):
    with pytest.raises(ClearheadError, match="already holds a run: go on with it by --resume"):
        again(tiny, stopped, resume=False)
    with pytest.raises(ClearheadError, match="holds no run to resume"):
        again(tiny, tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ClearheadError, match=r"cannot write .*run \(.*: choose another"):
        again(tiny, tmp_path / "file" / "run", resume=False)
    with pytest.raises(ClearheadError, match=r"cannot write .*file \(.*: choose another"):
        again(tiny, tmp_path / "file", resume=False)


def test_batches_that_do_not_fit_the_settings_are_refused_before_anything_is_written(
    tiny, tmp_path
):
    output = tmp_path / "run"
    with pytest.raises(ClearheadError, match="batches are 3 x 16 tokens"):
        again(tiny, output, batches=tiny.Batches(size=3), resume=False)
    with pytest.raises(ClearheadError, match="without document_ids"):
        again(tiny, output, resume=False, document_masks=True)
    documents = tiny.Batches()
    documents.batch = lambda step: {
        **tiny.Batches().batch(step),
        "document_ids": torch.zeros(2, 16, dtype=torch.int64),
    }
    with pytest.raises(ClearheadError, match="LlamaForCausalLM takes no document_ids"):
        again(tiny, output, batches=documents, resume=False, document_masks=True)
    assert not output.exists()


OLDER = Path(__file__).parent / "older_run"


def test_a_run_of_an_older_version_is_refused_in_a_line(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(OLDER, run, ignore=shutil.ignore_patterns("final", "text.jsonl"))
    shutil.copy(OLDER / "text.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", "run"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "is not of this version's clearhead train: give its own command again" in line
    assert "--train.optimizer orthoadam" in line  # its own command, for people


def test_a_model_of_an_older_version_is_opened_and_its_checkpoint_refused():
    model = ClearheadForCausalLM.from_pretrained(OLDER / "final")
    state = model.state_dict()
    for name, weight in load_file(OLDER / "final/model.safetensors").items():
        assert torch.equal(state[name], weight)
    assert model.config.normalizer == "softmax1"
    with pytest.raises(ClearheadError, match=r"earlier version's format: delete .*the first step"):
        checkpoint.verify(OLDER / "checkpoints/step-00000010")


def test_settings_of_an_earlier_version_go_by_their_present_names(tmp_path):
    now = json.loads(preset("coca", "tiny").to_json_string(use_diff=False))
    before = now | {"scores": "collinear", "residual_scale": "trainable"}
    refuse_changes(tmp_path, {"model": before}, {"model": now})
    with pytest.raises(ClearheadError, match=r"model\.scores was 'coca-slack' and is now 'coca'"):
        refuse_changes(tmp_path, {"model": before | {"scores": "collinear-slack"}}, {"model": now})
