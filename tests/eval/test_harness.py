"""Tasks of lm-eval run in process, from a folder of task files: no network is asked."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError
from clearhead.eval import harness
from clearhead.eval.harness import HarnessTask, check_names

from .conftest import log_p, numbers

evaluator = pytest.importorskip("lm_eval.evaluator")
huggingface = pytest.importorskip("lm_eval.models.huggingface")
tasks = pytest.importorskip("lm_eval.tasks")

STEMS = ("Who left?", "What came?", "Who knew it?", "What was seen again?")
CHOICES = (("The ship", "a letter"), ("The captain and the old woman", "It"), ("a", "b", "Nobody"))
ROWS = [
    {"question": stem, "choices": list(CHOICES[n % 3]), "label": n % 2}
    for n, stem in enumerate(STEMS * 5)
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 2.0
"""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    """datasets writes what it read beside nobody's own."""
    import datasets

    kept = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = str(tmp_path_factory.mktemp("datasets"))
    yield
    datasets.config.HF_DATASETS_CACHE = kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of task files, and beside it their data."""
    made = tmp_path / "tasks"
    made.mkdir()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    _write(made, "asked", TASK.format(name="asked", data=data))
    return made


def _write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.yaml").write_text(text, "utf-8")


def _measured(task: Any, subject: Any) -> dict[str, Any]:
    (cell,) = task.cells(subject)
    return numbers(task.measure(subject, cell))


def _by_hand(subject: Any) -> list[tuple[bool, bool]]:
    """Of each row whether the likeliest answer is right, and the likeliest by character: each alone
    and whole, in float64."""
    found = []
    for row in ROWS:
        scores = []
        for choice in row["choices"]:
            context = subject.tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
            ids = subject.tokenizer(f"Question: {row['question']}\nAnswer: {choice}")["input_ids"]
            scores.append(sum(log_p(subject.model, ids, len(ids) - len(context))))
        by_length = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        label = row["label"]
        found.append(tuple(x.index(max(x)) == label for x in (scores, by_length)))
    return found


def test_a_task_on_a_local_file_gives_what_is_found_by_hand(folder, make_subject):
    for subject in (make_subject(), make_subject("differential", batch_tokens=1)):
        task = HarnessTask(tasks=("asked",), include_path=str(folder))
        (cell,) = task.cells(subject)
        assert [cell[k] for k in ("task", "version", "shots")] == ["asked", "2.0", 0]
        found = numbers(task.measure(subject, cell))
        right, by_length = zip(*_by_hand(subject), strict=True)
        assert found["acc"] == sum(right) / len(ROWS)
        assert found["acc_norm"] == sum(by_length) / len(ROWS)
        assert found["items"] == len(ROWS)
        share = found["acc"]
        error = math.sqrt(share * (1 - share) / (len(ROWS) - 1))
        assert found["acc_stderr"] == pytest.approx(error)
        assert found["headlines"] == ("acc", "acc_norm")


def test_shots_and_limit(folder, subject, capsys):
    _measured(HarnessTask(tasks=("asked",), include_path=str(folder), limit=3), subject)
    assert "lm-eval: " not in capsys.readouterr().err
    _measured(HarnessTask(tasks=("asked",), include_path=str(folder), limit=3, shots=15), subject)
    said = capsys.readouterr().err  # of 64 tokens
    assert said.count("exceeds model's maximum length (64)") == 1
    task = HarnessTask(tasks=("asked",), include_path=str(folder), shots=2, limit=3)
    (cell,) = task.cells(subject)
    assert cell["shots"] == 2
    found = numbers(task.measure(subject, cell))
    assert found["items"] == 3
    again = evaluator.simple_evaluate(
        model=huggingface.HFLM(pretrained=subject.model, tokenizer=subject.tokenizer),
        tasks=["asked"],
        task_manager=tasks.TaskManager(include_path=str(folder), include_defaults=False),
        num_fewshot=2,
        limit=3,
        fewshot_random_seed=0,
    )["results"]["asked"]
    assert all(found[x] == again[f"{x},none"] for x in ("acc", "acc_stderr", "acc_norm"))


def test_tags_are_their_tasks_and_groups_have_numbers_of_their_own(folder, subject, monkeypatch):
    """In the index of the folder alone: lm-eval's own takes a minute to read."""
    own = partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("clearhead.eval.harness._all_tasks", lambda path: own(include_path=path))
    data = folder.parent / "rows.jsonl"
    _write(folder, "asked", "tag: both\n" + TASK.format(name="asked", data=data))
    _write(folder, "again", "tag: both\n" + TASK.format(name="again", data=data))
    group = "group: together\ntask: [asked, again]\n"
    _write(folder, "bare", group.replace("together", "bare"))
    mean = "aggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    _write(folder, "together", group + mean)
    task = HarnessTask(tasks=("both", "bare"), include_path=str(folder), limit=4)
    for cell in task.cells(subject):
        assert cell["shots"] == "as defined"
        lines = task.measure(subject, cell)
        shown = [(x["task"], x["metric"], x.get("shots")) for x in lines if "aside" not in x]
        assert shown == [
            (name, metric, 0)
            for name in (("asked", "again") if cell["task"] == "bare" else ("again", "asked"))
            for metric in ("acc", "acc_norm")
        ]
    task = HarnessTask(tasks=("together",), include_path=str(folder), limit=4)
    found = _measured(task, subject)
    assert found["headlines"] == ("acc",)
    assert found["items"] == 8
    assert found["acc"] == pytest.approx(next(x["value"] for x in lines if x["metric"] == "acc"))


def test_a_cell_is_another_where_a_file_of_the_folder_changed(folder, subject):
    task = HarnessTask(tasks=("asked",), include_path=str(folder))

    def digest() -> str:
        return str(task.cells(subject)[0]["digest"])

    first = digest()
    assert digest() == first
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[0]), "utf-8")
    assert digest() != first


def test_texts_are_read_apart_where_frequencies_follow_the_length(folder, subject, make_subject):
    """One after the other, and none with the frequencies of a longer one before it."""
    size = {"vocab_size": len(subject.tokenizer), "max_position_embeddings": 24}
    task = HarnessTask(tasks=("asked",), include_path=str(folder))
    plain = architectures.make("Llama", **size)
    expected = _measured(task, make_subject(model=plain))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = architectures.make("Llama", **size, rope_parameters=rope)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        model(torch.zeros(1, 60, dtype=torch.int64))  # frequencies of 60 tokens
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda _model, args, options: rows.append(len((*args, *options.values())[0])),
        with_kwargs=True,
    )
    assert _measured(task, make_subject(model=model)) == expected
    assert set(rows) == {1}


@pytest.mark.parametrize(
    ("word", "other", "message"),
    [
        ("rows.jsonl", "none.jsonl", r"cannot load the task asked .*: without the hub"),
        ("dataset_path: json", "dataset_path: nobody/nothing", r"\(.*nobody.nothing.*: without"),
        ("choices\n", "answers\n", r"cannot load the task asked \(.*\)$"),
        ("output_type", "unsafe_code: true\noutput_type", "marked as unsafe"),
        ("rows.jsonl", "long.jsonl", "cannot run the task asked"),  # an answer beyond the model
    ],
)
def test_tasks_that_cannot_be_loaded_or_run(word, other, message, folder, subject):
    long = {"question": "x", "choices": ["a", "ship " * 70], "label": 0}
    (folder.parent / "long.jsonl").write_text(json.dumps(long), "utf-8")
    plain = (folder / "asked.yaml").read_text("utf-8")
    _write(folder, "asked", plain.replace(word, other))
    with pytest.raises(ClearheadError, match=message) as raised:
        _measured(HarnessTask(tasks=("asked",), include_path=str(folder)), subject)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("caught", [False, True])
def test_no_program_of_a_metric_is_downloaded(folder, subject, monkeypatch, caught):
    """Nor is one run that lies in the working folder under the metric's name."""
    place = folder.parent / "sneaky"
    place.mkdir()
    (place / "sneaky.py").write_text(f"open({str(place / 'ran')!r}, 'w').write('')", "utf-8")
    monkeypatch.chdir(folder.parent)
    if caught:
        (folder / "more.py").write_text(
            "import evaluate\n\ndef asked(docs):\n    try:\n        evaluate.load('sneaky')\n"
            "    except Exception:\n        pass\n    return docs\n"
        )
        change = ("output_type", "process_docs: !function more.asked\noutput_type")
    else:
        change = ("metric: acc_norm", "metric: sneaky\n    hf_evaluate: true")
    text = (folder / "asked.yaml").read_text("utf-8").replace(*change)
    _write(folder, "asked", text)
    task = HarnessTask(tasks=("asked",), include_path=str(folder), limit=1)
    with pytest.raises(ClearheadError, match="computes sneaky by a program that `evaluate`"):
        _measured(task, subject)
    assert not (place / "ran").exists()


def test_names_of_nothing(folder, subject, monkeypatch):
    """A folder stands for lm-eval's own index, which takes many seconds to read."""
    others, text = ("perplexity", "passkey"), (folder / "asked.yaml").read_text("utf-8")
    for name in ("hellaswag", "arc_easy"):
        _write(folder, name, text.replace("task: asked", f"task: {name}"))
    index = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(harness, "_all_tasks", lambda path: index)
    for name, message in (
        ("helaswag", "did you mean hellaswag"),
        ("paskey", "did you mean passkey"),
        ("zzzz", r"`lm-eval ls tasks` lists the [\d,]+"),
    ):
        with pytest.raises(ClearheadError, match=message):
            check_names(("arc_easy", name), "", others)
    check_names(("asked",), str(folder), others)
    with pytest.raises(ClearheadError, match="lm_eval needs tasks"):
        HarnessTask().cells(subject)
    with pytest.raises(ClearheadError, match="tasksx' is no folder"):
        HarnessTask(tasks=("asked",), include_path=f"{folder}x").cells(subject)
