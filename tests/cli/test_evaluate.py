"""clearhead eval: a sweep that is kept cell by cell, goes on where it stopped, refuses early."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from clearhead.eval import TASKS
from clearhead.records.provenance import KEYS
from clearhead.report import load

from .conftest import call, cells_of, changed, data_of, lines_of, refusal, rewritten, saved


@pytest.fixture
def words(trained: Path, text: Path, cache: Path, tmp_path: Path) -> list[str]:
    return [
        *("eval", str(trained), *changed(data_of(text, cache), "--data.validation", "0.3")),
        *("--lengths", "128", "192", "--tokens", "2000"),
        *("--records", str(tmp_path / "records.jsonl")),
    ]


@pytest.fixture
def passkey(words: list[str]) -> list[str]:
    options = ["--passkey.trials", "2", "--passkey.depths", "0", "1", "--passkey.new-tokens", "3"]
    return [*words, *options, "--tasks", "perplexity,passkey"]


def test_a_sweep_is_kept_and_goes_on_where_it_stopped(passkey, tmp_path, monkeypatch, capsys):
    words = [*passkey, "--rope-scaling", "none,dynamic", "--factors", "2", "4"]
    measured: list[dict] = []
    plain = TASKS["passkey"].measure

    def stopping(self, subject, cell):
        measured.append(dict(cell))
        if len(measured) == 6:
            raise KeyboardInterrupt
        return plain(self, subject, cell)

    monkeypatch.setattr(TASKS["passkey"], "measure", stopping)
    assert call(*words) == 130
    assert len(cells_of(tmp_path)) == 2 + 4 + 2 + 1
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"kind": "cell", "run": "ti')  # torn by a power cut
    assert call(*words) == 0
    cells = cells_of(tmp_path)
    assert len(cells) == 3 * (2 + 4)
    assert len(measured) == 3 * 4 + 1
    assert len({cell["cell"] for cell in cells}) == len(cells)
    (run,) = load(tmp_path / "records.jsonl").runs
    assert len(run.cells) == len(cells)
    out = capsys.readouterr().out
    for name in ("none", "dynamic × 2", "dynamic × 4", "perplexity, none", "accuracy, none"):
        assert name in " ".join(out.split())
    before = lines_of(tmp_path)
    assert call(*words) == 0  # all known
    assert len(measured) == 3 * 4 + 1
    assert lines_of(tmp_path) == before  # a header would name a command that measured nothing
    assert call(*changed(words, "--passkey.trials", "3")) == 0  # other cells
    assert len(cells_of(tmp_path)) == 3 * (2 + 4 + 4)


def test_several_models_share_a_record_and_a_page(words, trained, tmp_path, capsys):
    """Side by side, with a chart by length and a verdict."""
    other = _with(tmp_path / "other", trained, 3.0)
    first, *options = words[1:]
    page = tmp_path / "page.html"
    options += ["--page", str(page)]
    assert call("eval", first, str(other), *options) == 0
    assert [run.arm for run in load(tmp_path / "records.jsonl").runs] == ["tiny", "other"]
    out = " ".join(capsys.readouterr().out.split())
    assert "│ tiny (reference" in out
    assert re.search(r"Perplexity at 192 tokens.*: tiny [\d.]+ .*; other [\d.]+", out)
    assert "Perplexity by length of text" in page.read_text("utf-8")
    assert call("eval", first, str(other), *options) == 0
    assert len(cells_of(tmp_path)) == 2 * 2  # all known
    made = (tmp_path / "records.jsonl").read_text("utf-8")
    refused = refusal(capsys, "eval", first, str(tmp_path / "othr"), *options)
    assert f"did you mean {other}?" in refused
    assert (tmp_path / "records.jsonl").read_text("utf-8") == made


def test_seeds_are_drawn_anew_and_pooled(passkey, tmp_path, capsys):
    words = changed(passkey, "--lengths", "128", "--passkey.depths", "0.5")
    assert call(*words, "--seeds", "0") == 0
    assert call(*words, "--seeds", "0", "3") == 0
    cells = cells_of(tmp_path)
    assert [(cell["task"], cell.get("draw")) for cell in cells] == [
        ("perplexity", None),  # reads the same text whatever the seed
        ("passkey", 0),
        ("passkey", 3),
    ]
    (run,) = load(tmp_path / "records.jsonl").runs
    (accuracy,) = run.select("accuracy", task="passkey")
    assert len(accuracy.details["items"]) == 2 + 2
    assert accuracy.value == sum(accuracy.details["items"]) / 4
    assert set(accuracy.draws) == {0, 3}
    (loss,) = run.select("answer_loss")
    losses = [cell["numbers"]["answer_loss"] for cell in cells[1:]]
    assert loss.value == pytest.approx(sum(losses) / 2)
    low, high = loss.details["interval"]
    assert low < loss.value < high
    assert "seeds must be one or more" in refusal(capsys, *words, "--seeds", "1", "1")


def test_a_header_and_a_cell_say_how_they_were_made(passkey, tokenizer, tmp_path):
    """What committed records need, of a run's model and of one that was not trained here."""
    untrained = saved(tmp_path / "untrained", tokenizer)
    words = changed(passkey, "--tasks", "passkey", "--passkey.depths", "0.5", "--lengths", "240")
    assert call(*words[:2], str(untrained), *words[2:]) == 0
    headers = [line for line in lines_of(tmp_path) if line["kind"] == "run"]
    for header, cell in zip(headers, cells_of(tmp_path), strict=True):
        origin, made = {key: header[key] for key in KEYS if key in header}, cell["made"]
        assert origin == {key: made[key] for key in KEYS if key in made}
        assert {"command", "versions", "device", "date"} <= set(origin)
        assert (made["dtype"], made["batch_tokens"], made["seed"]) == ("float32", 8192, 0)
        assert made["data"] is None  # a passkey's filler needs no text, and none was read
        assert made["seconds"] > 0
        assert made["peak_memory_bytes"] > 0
        assert cell["options"]["trials"] == 2
    assert [header["train"]["tokens"] for header in headers] == [512, 0]
    assert [header["model"]["from"] for header in headers] == [words[1], str(untrained)]
    assert [header["model"]["hidden_size"] for header in headers] == [24, 24]
    for line in lines_of(tmp_path):
        if line.get("metric") == "accuracy":
            low, high = line["interval"]
            assert low <= line["value"] <= high
            assert len(line["items"]) == 2
    run, _ = load(tmp_path / "records.jsonl").runs
    assert (run.preset, run.sequence_length) == ("transformer", 64)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tasks", "masked"], "masked is not for"),
        (["--tasks", "passkey,shots"], "give a .jsonl(.gz) file, --shots.data FILE"),
        (["--tasks", "passkey", "--rope-scaling", "ntk"], "ntk takes a factor"),
        (["--tasks", "passkey", "--rope-scaling", "ntkk"], "did you mean ntk?"),
        (["--factors", "two"], "could not convert string to float: 'two'"),
        (["--tasks", "passkey", "--lengths", "32"], "more than the length 32"),
        (["--tasks", "passkey", "--batch-tokens", "0"], "batch_tokens is 0"),
        (["--lengths", "999999"], "or read each source as one text (--perplexity.text stream)"),
        (
            ["--perplexity.text", "stream", "--perplexity.document-tokens", "200"],
            "no effect on --perplexity.text stream",
        ),
        (["--perplexity.stride", "150"], "stride is 150"),
        (["--data.data", "rows.jsonl"], "no field 'text', it has 'title', 'body'"),
    ],
)
def test_refuses_before_anything_is_measured(
    passkey, tmp_path, capsys, monkeypatch, extra, message
):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"title": "a", "body": "b"}\n' * 3)
    assert message in refusal(capsys, *changed(passkey, *extra))
    assert not (tmp_path / "records.jsonl").exists()


def test_half_of_the_stride_and_streams(words, tmp_path, capsys):
    assert call(*words, "--tasks", "perplexity", "hits", "--perplexity.text", "stream") == 0
    by_task = {cell["task"]: cell["numbers"] for cell in cells_of(tmp_path)}
    assert by_task["perplexity"]["stride"] == 96
    assert by_task["perplexity"]["left_out"] == 0
    assert by_task["hits"]["ar_hits"] > 0
    assert "others loss, none" in " ".join(capsys.readouterr().out.split())


def test_shots_and_a_file_that_changed(words, tmp_path, capsys):
    def write(word: str) -> None:
        rows = [{"text": f"{word} {n}", "label": ["one", "two"][n % 2]} for n in range(40)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    write("line")
    words += ["--tasks", "shots", "--shots.data", str(tmp_path / "rows.jsonl")]
    words += ["--shots.queries", "3", "--shots.permutations", "2", "--shots.counts", "1", "4"]
    assert call(*words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(part in out for part in ("margin, none", "shots 4"))
    assert len(cells_of(tmp_path)) == 2 * 2
    write("row")
    assert call(*words) == 0
    assert len(cells_of(tmp_path)) == 8


def _with(folder: Path, trained: Path, value: float) -> Path:
    """The trained model with an embedding, which is its head, of so many times the size."""
    shutil.copytree(trained / "final", folder)
    return rewritten(folder, lambda weights: weights["model.embed_tokens.weight"].mul_(value))


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_a_number_that_is_not_finite_is_said_and_ends_in_1(words, trained, tmp_path, capsys, value):
    broken, (_, good, *options) = _with(tmp_path / "broken", trained, value), words
    words = ["eval", str(broken), *options]
    assert call(*words) == 1
    out, err = capsys.readouterr()
    assert out.count("not finite") == 2  # a length each
    assert "Traceback" not in err
    page, report = tmp_path / "page.html", tmp_path / "report.html"
    assert call(*words[:1], good, *words[1:], "--page", str(page)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Perplexity at 192 tokens.*: tiny", out)
    assert call("report", str(tmp_path / "records.jsonl"), "--output", str(report)) == 1
    for html in (page.read_text("utf-8"), report.read_text("utf-8")):
        assert html.count("not finite") >= 2


def test_answers_of_a_model_without_numbers_are_not_wrong(passkey, trained, tmp_path, capsys):
    tasks = ["passkey", "needles", "recall", "hits"]
    _, _, *options = changed(passkey, "--tasks", *tasks)
    broken = _with(tmp_path / "broken", trained, math.nan)
    extra = ["--needles.samples", "1", "--recall.pairs", "3", "--needles.grid", "1x1"]
    assert call("eval", broken, *options, *extra) == 1
    shown = [line for line in lines_of(tmp_path) if line["kind"] == "measure"]
    assert {line["task"] for line in shown} == set(tasks)
    for line in shown:
        if not line.get("aside"):
            assert line["value"] is None
            assert "not finite" in line["reason"]
    out = capsys.readouterr().out
    assert "0 [" not in out


def test_a_run_is_measured_on_its_own_held_out_text(words, trained, text, tmp_path, capsys):
    """Which run.json knows, share and fields included."""
    _, run, *options = words
    options = [*options[2:4], *options[6:]]  # without its text and share
    assert call("eval", run, *options) == 0
    header = lines_of(tmp_path)[0]
    specs = [one["spec"] for one in header["data"]["sources"]]
    assert specs == [str(text), "synthetic:passkey:documents=60"]
    record = json.loads((trained / "run.json").read_text("utf-8"))
    made = record["description"]["data"]
    assert all(header["data"][key] == made[key] for key in ("validation", "tokens", "bytes"))
    assert (
        f"{text}, synthetic:passkey:documents=60 (held-out part)"
        in capsys.readouterr().out.replace("\n", "")
    )
    other = tmp_path / "run"
    other.mkdir()
    record["description"]["data"]["sources"] = [{"spec": "python-stdlib", "weight": None}]
    (other / "run.json").write_text(json.dumps(record), "utf-8")
    _with(other / "final", trained, 1.0)
    refused = refusal(capsys, "eval", run, str(other / "final"), *options)
    assert "trained on different texts" in refused
    assert "python-stdlib" in refused
