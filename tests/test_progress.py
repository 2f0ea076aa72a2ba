"""The line that says where long work is."""

import io

from clearhead.measure.sweep import name_of
from clearhead.progress import Line, Work


def test_a_log_has_a_line_for_each_run_and_about_twenty_between():
    now, stream = [0.0], io.StringIO()
    with Line(stream, clock=lambda: now[0]) as work:
        work.start(4)
        for number in range(4):
            work.begin(f"model {number}")
            for step in range(1, 101):
                now[0] += 1.2
                work.update(step / 100, f"step {step}/100")
            work.end()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 + 20
    assert lines[0] == "run 1 of 4: model 0"  # nothing is known of its pace yet
    assert lines[1] == "run 1 of 4, 8 min left  step 20/100"
    assert "run 2 of 4, 6 min left: model 1" in lines
    assert lines[-1] == "run 4 of 4, 0 s left  step 100/100"
    assert "\x1b" not in stream.getvalue()


def test_what_was_done_before_counts_as_done_and_not_as_fast():
    now = [0.0]
    work = Work(clock=lambda: now[0])
    work.start(10)
    for _ in range(8):
        work.skip()
    work.begin("resumed")
    work.resume(0.5)
    now[0] = 60.0
    work.update(0.75)  # a quarter in a minute, so five more minutes for one and a quarter
    assert work.place == "run 9 of 10, 5 min left"
    work.end()
    assert work.share == 0.9


def test_work_inside_other_work_leaves_the_total_as_it_is():
    work = Work()
    work.start(1)
    assert work.place == ""  # one unit is not numbered
    work = Work()
    work.start(6)
    work.start(2)
    assert work.place == "run 1 of 6"
    work.extend(2)
    assert work.place == "run 1 of 8"


def test_a_cell_of_a_sweep_is_named_by_its_task_scaling_place_and_draw():
    at = {"scaling": "yarn", "factor": 4.0, "length": 128}
    named = name_of({"task": "passkey", "at": at, "draw": 1})
    assert named == "passkey, scaling yarn, factor 4.0, length 128, seed 1"
    assert name_of({"task": "passkey", "at": {"depth": 0.5}}) == "passkey, depth 0.5"
