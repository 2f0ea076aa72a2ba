"""A run that goes on: resumed, extended, or refused before anything is written."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.records import manifest
from clearhead.train import is_finished, train


@pytest.fixture
def stopped(tiny, tmp_path):
    """A run interrupted after step 6."""
    output = tmp_path / "run"
    stop = tiny.SignalAt(6, signal.SIGTERM)
    handler = signal.getsignal(signal.SIGTERM)
    result = train(
        tiny.make_model(), tiny.Batches(), tiny.make_config(), output=output, callbacks=[stop]
    )
    assert result.interrupted
    assert result.steps == 6
    assert signal.getsignal(signal.SIGTERM) is handler
    return output


def again(tiny, output, model=None, batches=None, resume=True, **changes):
    return train(
        model or tiny.make_model(),
        batches or tiny.Batches(),
        replace(tiny.make_config(), **changes),
        output=output,
        resume=resume,
    )


def test_resuming_with_other_settings_names_each_with_both_values(tiny, stopped):
    with pytest.raises(ClearheadError) as caught:
        again(tiny, stopped, learning_rate=0.5, betas=(0.9, 0.99))
    message = str(caught.value)
    assert "learning_rate was 0.01 and is now 0.5" in message
    assert "betas was [0.9, 0.95] and is now [0.9, 0.99]" in message
    assert "\n" not in message


def test_what_an_older_record_lacks_differs(tiny, stopped):
    path = stopped / "checkpoints" / "step-00000006" / "trainer.json"
    record = json.loads(path.read_text())
    del record["sha256"], record["config"]["betas"]
    manifest.seal(path.parent, record, name=path.name)
    with pytest.raises(ClearheadError, match=r"train\.betas was None and is now \[0\.9, 0\.95\]"):
        again(tiny, stopped)


def test_a_setting_that_this_version_lacks_differs(tiny, stopped):
    path = stopped / "checkpoints" / "step-00000006" / "trainer.json"
    record = json.loads(path.read_text())
    del record["sha256"]
    record["config"]["rotation_sides"] = "both"
    manifest.seal(path.parent, record, name=path.name)
    with pytest.raises(ClearheadError, match=r"train\.rotation_sides was 'both' and is now None"):
        again(tiny, stopped)


def test_resuming_with_another_model_or_other_data_is_refused(tiny, stopped):
    with pytest.raises(ClearheadError, match=r"model\.intermediate_size was 48 and is now 64"):
        again(tiny, stopped, model=tiny.make_model(intermediate_size=64))
    other = tiny.Batches()
    other.fingerprint = "other"
    with pytest.raises(ClearheadError, match=r"data\.fingerprint was 'tiny' and is now 'other'"):
        again(tiny, stopped, batches=other)


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
    with pytest.raises(ClearheadError, match=r"cannot lock .*run: a file is where a folder has"):
        again(tiny, tmp_path / "file" / "run", resume=False)
    with pytest.raises(ClearheadError, match=r"cannot lock .*file: a file is where a folder has"):
        again(tiny, tmp_path / "file", resume=False)


def test_a_damaged_checkpoint_or_run_json_is_refused(tiny, stopped):
    (path,) = (stopped / "checkpoints" / "step-00000006").glob("shard-*.safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ClearheadError, match=r"\.safetensors is missing, cut short") as caught:
        again(tiny, stopped)
    assert "to resume from step-00000004" in str(caught.value)
    (stopped / "run.json").write_text("{")
    with pytest.raises(ClearheadError, match=r"run\.json is damaged"):
        again(tiny, stopped)


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
