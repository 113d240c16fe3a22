"""Tables of quickstart runs whose worlds differ."""

from benchmarks.report_quickstart import row, sources_of


def scores(*sources):
    return {source: {"f1": 0.5, "format": 1.0, "searches": 1.5} for source in ("all", *sources)}


def run_of(*sources):
    return {"before": {"1": scores(*sources)}, "after": {"1": scores(*sources)}, "seconds": {"total": 90.0}}


def test_world_without_comparison_questions_has_an_empty_cell():
    runs = {"short": run_of("one_hop", "two_hop"), "long": run_of("one_hop", "two_hop", "comparison")}
    sources = sources_of(runs, "1")
    assert sources == ["all", "one_hop", "two_hop", "comparison"]
    f1 = "0.50 -> 0.50"
    assert (
        row("short", runs["short"], "1", sources)
        == f"| short | {f1} | {f1} | {f1} |  | 1.000 | 1.50 | 90 |\n"
    )
    assert (
        row("long", runs["long"], "1", sources)
        == f"| long | {f1} | {f1} | {f1} | {f1} | 1.000 | 1.50 | 90 |\n"
    )


def test_kinds_that_no_world_has_get_no_column():
    assert sources_of({"short": run_of("two_hop", "one_hop")}, "1") == ["all", "one_hop", "two_hop"]
