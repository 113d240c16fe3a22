"""calibadv_jax.metrics.console: lines, bars and tables."""

from __future__ import annotations

import io
import queue
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from calibadv_jax.metrics import console as console_module
from calibadv_jax.metrics.catalogue import find_metric
from calibadv_jax.metrics.console import STEP_METRICS, Console, duration, number, table

NAN = float("nan")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Kernel(io.StringIO):
    """The stream of a notebook's kernel."""


Kernel.__module__ = "ipykernel.iostream"


# `clock` replaces time.monotonic, not this.
wait_for_other_threads = partial(time.sleep, 0.001)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    return now


def test_heading_is_progress():
    for progress, text in ((True, "── 1/6: world ──\n"), (False, "")):
        stream = io.StringIO()
        Console(progress, stream).heading("1/6: world")
        assert stream.getvalue() == text


def test_step_is_one_line():
    stream = io.StringIO()
    console = Console(stream=stream)
    metrics = {"perf/tokens_per_second": 2900.3, "reward/mean": 0.52341, "timing_s/step": 4.3, "unknown": 3.0}
    console.step(12, 60, metrics | {"perf/remaining_seconds": 200.0})
    assert stream.getvalue() == "step 12/60  reward 0.523    4.3 s/step    2,900 tok/s  ETA 3 min\n"
    assert all(map(find_metric, STEP_METRICS)), "every metric of the line is documented"


def test_lines_of_a_run_are_aligned():
    """However large or small the numbers, and whatever the width of a terminal."""
    stream = io.StringIO()
    console = Console(stream=stream)
    large = {"actor/grad_norm": 123.456, "rollout/sampled_tokens/mean": 16384.0}
    large |= {"timing_s/step": 123.456, "perf/tokens_per_second": 234567.0}
    for step, value in ((1, 0.0), (10, 0.987654), (100, 1.0), (1000, NAN)):
        metrics = dict.fromkeys(STEP_METRICS, value) | {"timing_s/step": 100.0}
        if step == 100:
            metrics |= large
        console.step(step, 2000, metrics)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and len(lines[0]) > 100
    assert len({line.index("s/step") for line in lines}) == 1
    assert len({line.index(" tok/s") for line in lines}) == 1
    assert lines[0].startswith("step    1/2000  loss  0.0000 nats  reward 0.000")


def test_last_step_of_a_run_names_no_time_left():
    stream = io.StringIO()
    Console(stream=stream).step(5, 5, {"timing_s/step": 8.0, "perf/remaining_seconds": 0.0})
    assert "ETA" not in stream.getvalue()


def test_step_has_seconds_rates_and_time_left(clock):
    """Parts add up, failing ones too; the first step of a start compiles and tells nothing of the others."""
    console, left = Console(progress=False), []
    for step, seconds in ((7, 500.0), (8, 10.0), (9, 12.0), (10, 8.0), (11, 8.0)):
        console.begin_step(step, 11)
        for waited in (2.0, 3.0):
            with suppress(OSError), console.live("rollouts", part="rollout"):
                clock[0] += waited
                raise OSError
        clock[0] += seconds - 5
        row = console.end_step({"tokens": (500, "step"), "searches": (20, "rollout")})
        left.append(row.pop("perf/remaining_seconds", None))
        rates = {"perf/tokens_per_second": 500 / seconds, "perf/searches_per_second": 4.0}
        assert row == {"timing_s/rollout": 5.0, "timing_s/step": seconds} | rates
    assert left == [None, 30.0, 22.0, 10.0, 0.0]


def test_line_shows_progress_and_ends(clock):
    console = Console(progress=False)
    lines = []
    with console.live("loading", "parts", lambda: (1, 4, "")):
        clock[0] += 10
        lines.append(console._line())
    for step in (1, 2, 8, 9):
        console.begin_step(step, 9)
        with console.live("rollouts", "trajectories", lambda: (34, 80, "3.2 searches/s")):
            for seconds in (40, 60):
                clock[0] += seconds
                lines.append(console._line())
        console.end_step({})
    work = ": rollouts 34/80 trajectories, 3.2 searches/s, "
    assert lines.pop(0) == "loading 1/4 parts, 10 s, 30 s left"
    assert [line.split(work) for line in lines] == [
        *(["step 1/9", "40 s"], ["step 1/9", "2 min"], ["step 2/9", "40 s"], ["step 2/9", "2 min"]),
        *(["step 8/9 (3 min left)", "40 s"], ["step 8/9 (2 min left)", "2 min"]),
        *(["step 9/9 (60 s left)", "40 s"], ["step 9/9 (0 s left)", "2 min"]),
    ]


def test_durations_and_numbers_are_short():
    seconds = (0, 89, 90, 720, 5399, 5400, 1.5 * 86400 - 1, 1.5 * 86400, 2.1 * 86400)
    expected = ["0 s", "89 s", "2 min", "12 min", "90 min", "1.5 h", "36.0 h", "1.5 d", "2.1 d"]
    assert [*map(duration, seconds)] == expected
    assert [*map(number, (-1234567, 9999999, 1e7))] == ["-1234567", "9999999", "1e+07"]
    shown = ["0.5234", "0", "5e-07", "12346", "-2.5", "nan"]
    assert [*map(number, (0.52341, 0.0, 5e-7, 12345.6, -2.5, NAN))] == shown


def test_no_progress_leaves_results_and_warnings(capsys):
    stream = Terminal()
    console = Console(progress=False, stream=stream)
    console.step(1, 2, {"reward/mean": 1.0})
    console.note("working")
    with console.phase("update", announce=True), console.bar("rollouts", 3, "trajectories") as show:
        show(1)
    console.say("written to runs/a")
    assert stream.getvalue() == "" and capsys.readouterr().out == "written to runs/a\n"
    console.warn("collapse")
    assert "warning: collapse" in stream.getvalue()


class Waits:
    """An event that comes during the wait of this number. Each wait takes its whole time on the clock."""

    def __init__(self, clock, number):
        self.clock, self.number, self.seconds = clock, number, []

    def wait(self, seconds):
        self.clock[0] += seconds
        self.seconds.append(seconds)
        return len(self.seconds) == self.number


@pytest.mark.parametrize(("kind", "pause"), [(io.StringIO, 60.0), (Terminal, 1.0)], ids=["file", "terminal"])
def test_progress_is_shown_after_a_pause_without_lines(kind, pause, clock):
    stream = kind()
    console = Console(stream=stream)
    console._blocks.append(console_module._Block("update", "", lambda: (0, 0, ""), clock[0]))
    clock[0] += 0.25
    console.note("a line")
    clock[0] += 0.25
    waits = Waits(clock, 4)
    console._show_until(waits)
    assert waits.seconds == [pause - 0.25, pause, pause, pause]
    shown = [line.rstrip() for line in stream.getvalue().replace("\r", "\n").split("\n") if line.strip()]
    assert shown == ["a line", *(f"update, {duration(0.25 + pause * times)}" for times in (1, 2, 3))]


def test_line_written_meanwhile_puts_progress_off(clock):
    stream = io.StringIO()
    console = Console(stream=stream)
    console._blocks.append(console_module._Block("update", "", lambda: (0, 0, ""), clock[0]))
    waits = Waits(clock, 3)
    wait, waits.wait = waits.wait, lambda seconds: wait(seconds - 20.0) or console.note("a line")
    console._show_until(waits)
    assert waits.seconds == [40.0, 40.0, 40.0] and stream.getvalue() == "a line\n" * 2


@pytest.mark.parametrize("stream", [Terminal(), Kernel()], ids=["terminal", "notebook"])
def test_line_is_rewritten(stream, monkeypatch, clock):
    monkeypatch.setattr(console_module, "REWRITTEN_SECONDS", 0.0)  # the clock stands
    monkeypatch.setenv("COLUMNS", "40")
    console = Console(stream=stream)
    with console.phase("publishing the policy", announce=True):
        while "\rpublishing the policy, 0 s" not in stream.getvalue():
            wait_for_other_threads()
    with console.bar("rollouts", 2560, "trajectories of a long name") as show:
        show(137)
        while "\rrollouts 137/2560 trajectories" not in stream.getvalue():
            wait_for_other_threads()
        console.note("a line [1/2] above the bar")
    text = stream.getvalue()
    lines = [line.rstrip() for line in text.replace("\n", "\r").split("\r") if line.strip()]
    assert "\x1b" not in text and "\ra line [1/2] above the bar\n" in text and text.endswith((" \r", "bar\n"))
    assert max(map(len, lines)) == 39 if stream.isatty() else any(line.endswith(" left") for line in lines)


def test_file_gets_plain_lines():
    stream = io.StringIO()
    console = Console(stream=stream)
    with console.phase("waiting for the retriever", announce=True), console.phase("update"):
        pass
    console.warn("[red]x[/red] " + "long " * 40)
    assert stream.getvalue() == "waiting for the retriever\nwarning: [red]x[/red] " + "long " * 40 + "\n"


def test_long_phase_repeats_its_progress(monkeypatch, clock):
    """Where nothing moves: also while nothing is reported, and of nested phases only the inner one."""
    stream, lines = io.StringIO(), queue.Queue()
    monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.0)  # the clock stands
    console = Console(stream=stream)
    stream.write = lambda text: lines.put(text.rstrip("\n")) if text.strip() else None
    with console.phase("update, compiling"):
        assert lines.get() == "update, compiling, 0 s"
        with console.bar("rollouts", 80, "trajectories") as show:
            show(10)
            newest = iter(lines.get, "rollouts 10/80 trajectories, 0 s, 0 s left")
            assert set(newest) <= {"update, compiling, 0 s", "rollouts 0/80 trajectories, 0 s"}
            assert {lines.get() for _ in range(3)} == {"rollouts 10/80 trajectories, 0 s, 0 s left"}
        while lines.get() != "update, compiling, 0 s":
            pass
    while not lines.empty():
        lines.get()
    with Console(False, stream).phase("update"):
        assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_block_ends_after_the_thread_that_shows_its_progress(monkeypatch, clock):
    """Otherwise the thread could still write its line, below those that follow the block."""
    monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.0)  # the clock stands
    has_begun = threading.Event()

    def progress():
        has_begun.set()
        time.sleep(0.2)
        return 1, 2, ""

    with Console(stream=io.StringIO()).live("update", "rows", progress):
        has_begun.wait()
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_table_aligns_cells_and_checks_rows():
    text = table([["one-hop", 0.51234, 40], ["all", 1.0, 200]], ["questions", "F1", "n"])
    assert text.splitlines() == [
        "questions     F1    n",
        "---------  -----  ---",
        "one-hop    0.512   40",
        "all        1.000  200",
    ]
    assert table([], ["a", "bb"]) == "a  bb\n-  --"
    with pytest.raises(ValueError):
        table([["a"]], ["a", "b"])


def test_controls_of_a_terminal_are_not_written(capsys):
    """Names in a run of somebody else may hold escape sequences."""
    hostile = "a\x1b]0;title\x07b\x9b2Jc\u202ed\ne\rf"
    stream = io.StringIO()
    Console(stream=stream).say(hostile)
    Console(stream=stream).warn(hostile)
    shown = "a]0;titleb2Jcd\nef\n"
    assert capsys.readouterr().out == shown
    assert stream.getvalue() == f"warning: {shown}"
