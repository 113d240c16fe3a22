"""Progress of a build: where its bar begins, and when it is silent."""

from retriever.indexes.progress import progress_bar


def test_bar_begins_with_what_earlier_runs_did(capsys):
    with progress_bar(10, "encode") as bar:
        assert (bar.n, bar.total) == (0, 10)
        bar.update(3)
        assert bar.n == 3
    with progress_bar(10, "encode", done=4) as bar:
        assert (bar.initial, bar.n) == (4, 4)


def test_hidden_bar_writes_nothing(capsys, monkeypatch):
    monkeypatch.setattr("retriever.indexes.progress.LOG_SECONDS", 0.0)
    for is_shown in (False, True):
        with progress_bar(2, "encode", is_shown=is_shown) as bar:
            bar.update(1)
            bar.refresh()
        assert ("encode" in capsys.readouterr().err) == is_shown
