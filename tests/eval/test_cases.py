"""Documents from files: what each form of row asks, and rows that lack a field."""

import gzip
import json

import pytest

from clearhead import ClearheadError
from clearhead.eval.cases import Case, load_cases, local

REFERENCES = ("one", "two")
FORMS = {
    "nq": (
        {"question": " who\nleft ", "answers": REFERENCES, "title": "Sea", "passage": "It left. "},
        [Case(kind="answer", document="Sea\nIt left.", question="who left", references=REFERENCES)],
    ),
    "hotpotqa": (
        {
            "id": "7",
            "question": "Who?",
            "answers": ["one"],
            "contexts": [
                {"title": "A", "text": "It.", "gold": True},
                {"title": "B", "text": "Then."},
            ],
        },
        [Case(kind="answer", document="A\nIt.\n\nB\nThen.", question="Who?", references=("one",))],
    ),
    "longbench": (
        {"input": "Who?", "context": "It.", "answers": ["one"], "dataset": "qasper"},
        [Case(kind="answer", document="It.", question="Who?", references=("one",))],
    ),
    "longbench summary": (
        {"input": "", "context": "It.", "answers": ["one"]},
        [Case(kind="summary", document="It.", question="", references=("one",))],
    ),
    "scitldr": (
        {"id": "x", "title": "T", "text": "It.", "summaries": REFERENCES},
        [Case(kind="summary", document="It.", question="", references=REFERENCES)],
    ),
    "xsum": (
        {"document": "It.", "summary": "one", "id": "1"},
        [Case(kind="summary", document="It.", question="", references=("one",))],
    ),
    "cnn": (
        {"article": "It.", "highlights": "one", "id": "1"},
        [Case(kind="summary", document="It.", question="", references=("one",))],
    ),
    "squality": (
        {
            "text": "It.",
            "questions": [
                {"question": "Who?", "summaries": REFERENCES},
                {"question": "Why?", "summaries": ["three"]},
            ],
        },
        [
            Case(kind="summary", document="It.", question="Who?", references=REFERENCES),
            Case(kind="summary", document="It.", question="Why?", references=("three",)),
        ],
    ),
    "qmsum": (
        {"text": "A: It.", "queries": [{"type": "general", "query": "Who?", "answer": "one"}]},
        [Case(kind="summary", document="A: It.", question="Who?", references=("one",))],
    ),
}


@pytest.fixture
def write(tmp_path):
    def make(*rows, name="rows.jsonl"):
        path = tmp_path / name
        with (gzip.open if name.endswith(".gz") else open)(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return str(path)

    return make


@pytest.mark.parametrize("form", FORMS)
def test_the_fields_tell_what_is_asked(write, form):
    row, cases = FORMS[form]
    assert load_cases(write(row, row, name="rows.jsonl.gz")) == cases * 2


NQ = FORMS["nq"][0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [NQ, {"question": "who", "answers": ["x"]}],
            r"line 2 lacks passage \(a row has passage, question, answers\); it has question, answ",
        ),
        (
            [{"text": "It.", "id": 1}],
            r"lacks summaries \(a row has text, summaries\); it has text,",
        ),
        ([{"text": "It."} | {"label": 1, "story": 2}], "it has text, label, story"),
        ([{"story": "It.", "label": 1}], "line 1 lacks passage, question, answers or .*has story"),
        ([{}], "it has nothing"),
        ([[1]], "line 1 is no object"),
        ([NQ, FORMS["xsum"][0]], "line 2 has document, summary, and the rows before it passage, q"),
        (
            [{"text": "It.", "queries": [{"query": "a", "answer": "b"}, {"query": "a"}]}],
            "line 1, queries 2 lacks answer; it has query",
        ),
        (
            [{**FORMS["hotpotqa"][0], "contexts": [{"title": "a", "body": "b"}]}],
            "line 1, contexts 1 lacks text; it has title, body",
        ),
        (
            [{**FORMS["hotpotqa"][0], "contexts": ["a"]}],
            r"contexts must be a list of objects and not empty; found \['a'\]",
        ),
        ([{**NQ, "answers": []}], r"answers must be a text, or a list of them, .*found \[\]"),
        ([{**NQ, "answers": [1]}], r"found \[1\]"),
        ([{**NQ, "passage": " "}], "passage must be a text and not empty; found ' '"),
        ([{**NQ, "question": 7}], "question must be a text and not empty; found 7"),
        ([{**NQ, "question": " "}], "question is empty"),
        ([{"text": "It.", "queries": {"query": "a"}}], "queries must be a list of objects"),
        ([], "rows.jsonl has nothing to ask: give a row a line, with passage, question"),
    ],
)
def test_refuses_rows_that_lack_a_field(write, rows, message):
    with pytest.raises(ClearheadError, match=message) as error:
        load_cases(write(*rows))
    assert "\n" not in str(error.value)


def test_refuses_files_that_cannot_be_read(tmp_path, write):
    with pytest.raises(ClearheadError, match=r"no such file; give a .jsonl.* or hf:NAME"):
        load_cases(str(tmp_path / "none.jsonl"))
    (tmp_path / "rows.txt").write_text("text")
    with pytest.raises(ClearheadError, match=r"rows.txt': no such file; give a .jsonl"):
        load_cases(str(tmp_path / "rows.txt"))
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(NQ) + "\n{no")
    with pytest.raises(ClearheadError, match="line 2: not JSON"):
        load_cases(str(path))
    with pytest.raises(ClearheadError, match=r"found 'a{50,60}$"):  # a part of it
        load_cases(write({**FORMS["qmsum"][0], "queries": "a" * 900}))


def test_a_data_set_of_the_hub_is_read_once(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [FORMS["xsum"][0], {"document": "It.", "summary": None}]
    (tmp_path / "set" / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:1])))
    source = f"hf:{tmp_path / 'set'}#test"
    assert load_cases(source) == FORMS["xsum"][1]
    (tmp_path / "set" / "test.jsonl").unlink()
    assert load_cases(source) == FORMS["xsum"][1]
    local(source).write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ClearheadError, match=r"^hf:.*#test, row 2: summary must be a text"):
        load_cases(source)
    with pytest.raises(ClearheadError, match="cannot be had from the hub"):
        load_cases(f"hf:{tmp_path / 'none'}")
