"""Finished runs that were damaged, folders in use, full disks: one line, and nothing is lost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.papers.stages import reproduce
from clearhead.progress import Work
from clearhead.records.files import hold_file, hold_folder
from clearhead.report import load

from .conftest import SMALL, STEPS, call, data_of, refusal

RUN = "transformer-seed0"


@pytest.fixture(scope="module")
def text_words(text: Path, cache: Path) -> list[str]:
    return data_of(text, cache)


@pytest.fixture(scope="module")
def compared(text_words: list[str]) -> Callable[[Path], list[str]]:
    """compared(output): the words of a comparison of one small model over two steps."""

    def words(output: Path) -> list[str]:
        return [
            *("compare", "transformer", "--set", *SMALL, "--lengths", "1"),
            *("--evaluation-tokens", "64", *text_words, "--data.vocabulary", "300", *STEPS),
            *("--output", str(output)),
        ]

    return words


@pytest.fixture(scope="module")
def whole(compared: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison, started where a kill had left a folder and nothing in it."""
    output = tmp_path_factory.mktemp("whole") / "out"
    (output / RUN).mkdir(parents=True)
    assert call(*compared(output)) == 0
    return output


@pytest.fixture
def output(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "out"))


def test_a_comparison_leaves_no_lock_and_its_model_is_plain(output):
    assert load(output / "records.jsonl").runs[0].header["versions"]["tokenizers"]
    assert sorted(path.name for path in output.iterdir()) == ["records.jsonl", "report.html", RUN]
    assert not [path for path in output.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"{}\n", lambda content: content.replace(b'"value": ', b'"value": [', 1)],
)
def test_damaged_records_are_named_and_never_written_over(output, compared, capsys, damage):
    records = output / "records.jsonl"
    records.write_bytes(bad := damage(records.read_bytes()))
    assert f"{records}, line" in refusal(capsys, *compared(output))
    assert records.read_bytes() == bad


@pytest.mark.parametrize("lost", ["all", "the end", "the run"])
def test_what_is_lost_is_made_again(output, compared, capsys, lost):
    """The end of the records, as after a kill while a run was appended; or the run itself."""
    records = output / "records.jsonl"
    whole = load(records).runs[0]
    if lost == "the run":
        shutil.rmtree(output / RUN)
    else:
        records.write_bytes(b"" if lost == "all" else records.read_bytes()[:-9])
    assert call(*compared(output)) == 0
    assert "already done" not in capsys.readouterr().err
    (again,) = load(records).runs
    assert [line["loss"] for line in again.steps] == [line["loss"] for line in whole.steps]
    assert again.value("perplexity", length=16) == whole.value("perplexity", length=16)


@pytest.mark.parametrize("content", ["", '{"config": null, "description": 3}'])
def test_a_damaged_run_json_is_named(output, compared, text_words, capsys, content):
    (output / "records.jsonl").unlink()
    path = output / RUN / "run.json"
    path.write_text(content)
    assert f"{path} is damaged" in refusal(capsys, *compared(output))
    words = ("eval", output / RUN, *text_words, "--lengths", "16", "--tokens", "64")
    assert f"{path} is damaged" in refusal(capsys, *words)


def test_damaged_weights_are_measured_by_no_verb(output, compared, text_words, tmp_path, capsys):
    final = output / RUN / "final"
    content = bytearray((final / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (final / "model.safetensors").write_bytes(content)
    (output / "records.jsonl").unlink()
    named = f"{final / 'model.safetensors'} is missing, cut short or changed: restore"
    small = ("--length", "16", "--tokens", "64")
    for words in (
        compared(output),
        ("eval", output / RUN, *text_words, "--lengths", "16"),
        ("diagnose", output / RUN, *text_words, "--output", tmp_path / "diagnosed"),
        ("quantize", output / RUN, *text_words, *small),
        ("generate", output / RUN, "a"),
        ("convert", output / RUN, tmp_path / "converted"),
    ):
        assert named in refusal(capsys, *words)
    assert not (tmp_path / "diagnosed").exists()
    older = final / "manifest.json"
    older.unlink()
    assert call("generate", output / RUN, "a", "--tokens", "1") == 0


def test_a_pipe_is_neither_read_for_ever_nor_replaced(output, text_words, tmp_path, capsys):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for words in (
        ("eval", output / RUN, *text_words, "--records", pipe),
        ("report", pipe),
        ("report", output / "records.jsonl", "--output", pipe),
    ):
        assert f"{pipe}: not a regular file" in refusal(capsys, *words)
        assert pipe.is_fifo()


def test_a_folder_or_a_file_in_use_is_refused_by_every_verb_that_writes_there(
    output, compared, text_words, tmp_path, capsys
):
    records = tmp_path / "records.jsonl"
    with hold_folder(output), hold_file(records):
        assert f"{output} is in use by" in refusal(capsys, *compared(output))
        with pytest.raises(Exception, match="out is in use by"):
            reproduce([], output, jobs=1, work=Work("job"))
        words = (output / RUN, *text_words, "--records", records, "--tokens", "64")
        for verb, length in (("eval", "--lengths"), ("quantize", "--length")):
            said = refusal(capsys, verb, *words, length, "16")
            assert f"{records} is in use by" in said
    assert not records.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_line_in_convert_and_finetune(output, tmp_path, capsys, room):
    made = tmp_path / "made"
    with room(5000):
        said = refusal(capsys, "convert", output / RUN, made)
    assert f"cannot write {made} (File too large): make room" in said
    assert call("convert", output / RUN, made) == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{w}", "label": "{w}"}}\n' for w in ("a", "b", "a", "b")))
    words = ["finetune", output / RUN, "--train-file", rows, "--validation-file", rows]
    words += ["--train.max-length", "8", "--train.epochs", "1", "--output", tmp_path / "tuned"]
    with room(8000):  # more than run.json has
        said = refusal(capsys, *words)
    first = tmp_path / "tuned/seed0/checkpoints/step-00000001"
    assert f"cannot write {first} (File too large): there is none before it; make room" in said
    assert not (tmp_path / "tuned/seed0/final").exists()
    assert call(*words) == 0
    with hold_folder(tmp_path / "tuned"):
        assert "tuned is in use by" in refusal(capsys, *words)
