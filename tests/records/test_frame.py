"""Records as one table."""

from clearhead.records.frame import COLUMNS, frame
from clearhead.records.loading import parse
from clearhead.records.runs import DIMENSIONS


def test_each_number_is_a_row_with_its_run_and_dimensions():
    head = {"preset": "sas", "seed": 1, "label": "6 layers"}
    train = {"sequence_length": 8, "learning_rate": 2e-3}
    lines = [
        {"kind": "run", "run": "sas/seed1", "arm": "sas", **head, "train": train},
        {"kind": "measure", "run": "sas/seed1", "metric": "loss", "length": 8, "value": 2.5},
        {"kind": "measure", "run": "sas/seed1", "metric": "loss", "step": 5, "value": None},
    ]
    table = frame({"r": parse([{**lines[0], "model": {"vocab_size": 64}}, *lines[1:]])})
    assert [*table.columns] == [*COLUMNS]
    assert {*DIMENSIONS} < {*COLUMNS}
    first, second = (row for _, row in table.iterrows())
    named = ["source", "label", "run", "arm", "seed", "metric", "value", "length"]
    assert [*first[named]] == ["r", "6 layers", "sas/seed1", "sas", 1, "loss", 2.5, 8]
    facts = first[["sequence_length", "vocabulary", "learning_rate", "at_edge"]]
    assert [*facts] == [8, 64, 2e-3, False]
    assert first["measure"].value == 2.5
    assert (second["step"], second.isna()["value"], second.isna()["length"]) == (5, True, True)
    assert len(frame({})) == 0
