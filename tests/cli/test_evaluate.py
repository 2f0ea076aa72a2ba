"""clearhead eval: a sweep that is kept cell by cell, goes on where it stopped, refuses early."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import tests_judge_server as served

from clearhead.lab.measuring import TASKS
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
    assert lines_of(tmp_path) == before  # a header would name a command that measured nothing


def test_several_models_share_a_record_and_a_page(words, trained, tmp_path, capsys):
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
    refused = refusal(capsys, "eval", first, str(tmp_path / "othr"), *options)
    assert "no such folder" in refused
    (tmp_path / "empty").mkdir()
    anew = changed(options, "--records", str(tmp_path / "anew.jsonl"))
    assert "cannot load" in refusal(capsys, "eval", first, str(tmp_path / "empty"), *anew)
    assert not (tmp_path / "anew.jsonl").exists(), "the first model was not measured"


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
    run, _ = load(tmp_path / "records.jsonl").runs
    assert (run.preset, run.sequence_length) == ("transformer", 64)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tasks", "masked"], "masked is not for"),
        (["--tasks", "passkey,shots"], "give a .jsonl(.gz) file, --shots.data FILE"),
        (["--tasks", "passkey", "--rope-scaling", "ntk"], "ntk takes a factor"),
        (["--tasks", "passkey", "--lengths", "32"], "more than the length 32"),
        (["--lengths", "999999"], "shorter lengths or --perplexity.text stream"),
        (
            ["--perplexity.text", "stream", "--perplexity.document-tokens", "200"],
            "no effect on --perplexity.text stream",
        ),
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


def test_a_run_is_measured_on_its_own_held_out_text(words, trained, text, tmp_path, capsys):
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


# Questions of the harness, and with a judge


def test_tasks_of_the_harness(trained, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    data, records = tmp_path / "rows.jsonl", tmp_path / "records.jsonl"
    rows = [{"question": "Which?", "choices": ["query", "key"], "label": n % 2} for n in range(3)]
    data.write_text("\n".join(map(json.dumps, rows)))
    task = {"dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "choices"}
    task |= {"doc_to_target": "label", "metric_list": [{"metric": "acc"}]}
    task["metadata"] = {"version": 1.0}
    (tmp_path / "tasks").mkdir()
    for name, file in (("asked", str(data)), ("lost", f"{data}x")):  # JSON is YAML
        files = {"data_files": {"test": file}, "cache_dir": str(tmp_path / "c")}
        task |= {"task": name, "dataset_kwargs": files}
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps(task), "utf-8")
    words = ["eval", str(trained), "--lm-eval.include-path", str(tmp_path / "tasks")]
    words += ["--records", str(records), "--tasks"]
    assert call(*words, "asked") == 0
    capsys.readouterr()
    (theirs,) = cells_of(tmp_path)
    assert theirs["numbers"]["items"] == 3
    assert theirs["made"]["data"] is None
    assert (theirs["task"], theirs["at"]["task"]) == ("lm_eval", "asked")
    lines = [line for line in lines_of(tmp_path) if line.get("task") == "asked"]
    assert [line["metric"] for line in lines if "aside" not in line] == ["acc"]
    assert "tasks" not in theirs["options"]
    assert call(*words, "asked", "lost") == 2  # what is known is not measured again
    said = capsys.readouterr()
    assert "cannot load the task lost" in said.err.strip().splitlines()[-1]
    assert len(cells_of(tmp_path)) == 1
    assert "acc, none, version 1.0, shots 0" in " ".join(said.out.split())


def test_a_judge_that_goes_away_leaves_what_is_measured(
    trained, tmp_path, capsys, monkeypatch, judge
):
    def file(name: str) -> str:
        rows = [{"summary": "a head", "document": f"A {n} of {name}"} for n in range(3)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    monkeypatch.setenv("A_KEY", "sk-secret")
    records = tmp_path / "records.jsonl"
    words = ["eval", str(trained), "--tasks", "hallucination", "--lengths", "256"]
    words += ["--hallucination.files", file("one.jsonl"), file("two.jsonl")]
    words += ["--records", str(records), "--hallucination.summary-tokens", "5"]
    assert call(*words) == 0
    assert "accuracy" not in capsys.readouterr().out  # nobody judged
    words += ["--hallucination.judge.endpoint", judge.url, "--hallucination.judge.model", "gpt-x"]
    words += ["--hallucination.judge.key-variable", "A_KEY"]

    def leaving(prompt: str) -> served.Answer:
        if len(judge.prompts) > 4:
            raise ConnectionError
        supported = "one.jsonl" in prompt
        echo = "I was asked with Bearer sk-secret"
        return served.completion(f"{echo}\nConclusion: {supported}", model="judge of sk-secret")

    judge.answer = leaving
    assert call(*words) == 0
    shown = capsys.readouterr()
    assert "2 of 3 texts are unjudged" in shown.err
    results = [cell["numbers"] for cell in cells_of(tmp_path)]
    assert [result.get("accuracy") for result in results] == [None, None, 1.0, 0.0]
    assert [result.get("unjudged") for result in results] == [None, None, 0, 2]
    assert "file two.jsonl, judge gpt-x" in " ".join(shown.out.split())
    for path in tmp_path.iterdir():
        assert "sk-secret" not in path.read_text("utf-8")
