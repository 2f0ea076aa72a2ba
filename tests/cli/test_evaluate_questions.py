"""clearhead eval on questions of the harness, and with a judge."""

import json

import pytest
import tests_judge_server as served

from .conftest import call, cells_of, lines_of


def test_tasks_of_the_harness(trained, tmp_path, capsys):
    """From a folder; where one cannot be had, what is done is shown."""
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
    without = [word for word in words if word not in ("--records", str(records))]
    assert call(*without, "asked", "lost") == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "acc, none, version 1.0, shots 0" in out
    assert "±" in out
    page = tmp_path / "page.html"
    assert call("report", str(records), "--output", str(page)) == 0
    assert "asked" in page.read_text("utf-8")


def test_a_judge_that_goes_away_leaves_what_is_measured(
    trained, tmp_path, capsys, monkeypatch, judge
):
    def file(name: str) -> str:
        rows = [{"summary": "a head", "document": f"A {n} of {name}"} for n in range(3)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    monkeypatch.setenv("A_KEY", "sk-secret")
    records, page = tmp_path / "records.jsonl", tmp_path / "page.html"
    words = ["eval", str(trained), "--tasks", "hallucination", "--lengths", "256"]
    words += ["--hallucination.files", file("one.jsonl"), file("two.jsonl")]
    words += ["--records", str(records), "--hallucination.summary-tokens", "5"]
    assert call(*words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "accuracy" not in out  # nobody judged
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
    for before, after in zip(results[:2], results[2:], strict=True):
        assert {key: after[key] for key in before} == before
    out = " ".join(shown.out.split())
    assert "accuracy, none" in out
    assert "file two.jsonl, judge gpt-x" in out
    assert call("report", str(records), "--output", str(page)) == 0
    assert "none, file two.jsonl, judge gpt-x" in page.read_text("utf-8")
    for path in tmp_path.iterdir():
        assert "sk-secret" not in path.read_text("utf-8")
