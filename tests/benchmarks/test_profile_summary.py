"""The most expensive operations of a profile, in words."""

import gzip
import json

import pytest

from benchmarks.profile_summary import events_of, kind_of, operations, report


def event(name, microseconds, place="", phase="X"):
    return {"ph": phase, "dur": microseconds, "args": {"hlo_op": name, "tf_op": place}}


EVENTS = [
    event("fusion.1", 100, "jit(accumulate)/dot_general"),
    event("fusion.1", 200, "jit(accumulate)/dot_general"),
    event("custom-call.2", 500, "jit(accumulate)/flash_attention"),
    event("while.3", 5000),  # its time is that of the operations inside
    event("add.4", 200),
    event("add.4", 70, phase="M"),
    {"ph": "X", "dur": 9000, "args": {}},  # Python's own
]


def test_operations_are_summed_and_the_most_expensive_comes_first():
    profile = operations(EVENTS)
    assert [operation.name for operation in profile] == ["custom-call.2", "fusion.1", "add.4"]
    assert [operation.calls for operation in profile] == [1, 2, 1]
    assert [operation.seconds for operation in profile] == pytest.approx([5e-4, 3e-4, 2e-4])
    assert [operation.share for operation in profile] == pytest.approx([0.5, 0.3, 0.2])
    assert [operation.kind for operation in profile] == ["attention", "matrix product", "element by element"]


def test_report_names_kinds_and_as_many_operations_as_asked_for():
    lines = report(operations(EVENTS), 1).splitlines()
    assert lines[0] == "attention 50%, matrix product 30%, element by element 20%"
    assert len(lines) == 2
    assert lines[1].endswith("1 calls  attention: custom-call.2 jit(accumulate)/flash_attention")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-gather-start.1", "exchange between devices"),
        ("loop_dynamic-update-slice_fusion", "copy"),
        ("input_scatter_fusion", "look-up or scatter"),
        ("nvjet_tst_128x256", "matrix product"),
        ("input_reduce_fusion", "reduction"),
        ("loop_multiply_fusion", "element by element"),
    ],
)
def test_kind_of_an_operation(name, kind):
    assert kind_of(name) == kind


def test_newest_trace_of_a_folder_is_read(tmp_path):
    file = tmp_path / "plugins/profile/1/host.trace.json.gz"
    file.parent.mkdir(parents=True)
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": EVENTS}, stream)
    assert events_of(tmp_path) == EVENTS


def test_folder_without_a_trace_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no .*trace.json.gz below it"):
        events_of(tmp_path)
