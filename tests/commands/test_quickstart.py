"""The quickstart: its chain and its table."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from trainer_rig import make_config

from calibadv_jax.contrib.cli import quickstart
from calibadv_jax.core.errors import UserError

MEANS = {"f1": 0.5, "format": 1.0, "searches": 2.0}


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """The config, and what was done in which order."""
    done = []
    config = make_config(tmp_path, sft={"output": str(tmp_path / "sft")}, world={"dir": str(tmp_path / "w")})

    @contextmanager
    def services(config, folder):
        done.append(("services", str(folder)))
        yield "http://here", ["http://worker"]
        done.append("services ended")

    def evaluated(config, source):
        done.append((config.evaluate.output, source, config.retriever.url, config.sampler.urls))
        return SimpleNamespace(means={"0": {"all": MEANS | {"f1": len(done) / 10}}})

    monkeypatch.setattr(quickstart, "write_world", lambda world, protocol: done.append("world"))
    monkeypatch.setattr(quickstart.sft, "run", lambda config: done.append("cold start"))
    monkeypatch.setattr(quickstart, "check_cold_start", lambda config, *_: done.append("cold start checked"))
    monkeypatch.setattr(quickstart, "open_services", services)
    monkeypatch.setattr(quickstart, "find_policy", lambda path: str(path))
    monkeypatch.setattr(quickstart, "evaluate_policy", evaluated)

    def trained(now, kept):
        done.append(("train", now.retriever.url, replace(kept, log=config.log) == config))

    monkeypatch.setattr(quickstart.train, "run", trained)
    monkeypatch.setattr(quickstart.export, "export", lambda config: done.append("export") or tmp_path / "hf")
    monkeypatch.setattr(quickstart.report_command, "is_installed", lambda: True)
    monkeypatch.setattr(
        quickstart.report_command,
        "write_report",
        lambda folders, page, console, is_trusted: done.append(
            ("page", list(map(str, folders)), str(page), is_trusted)
        ),
    )
    return config, done


def test_every_part_runs_once_and_the_services_end(tmp_path, chain, capsys):
    config, done = chain
    config = replace(config, log=replace(config.log, progress=True))
    quickstart.run(config)
    on = "http://here", ["http://worker"]
    assert done == [
        "world",
        "cold start",
        ("services", f"{tmp_path}/sft"),
        (f"{tmp_path}/evaluation_before.json", f"{tmp_path}/sft", *on),
        ("train", "http://here", True),  # the folder keeps no address of a service that ends
        "export",
        (f"{tmp_path}/evaluation_after.json", f"{tmp_path}/hf", *on),
        "services ended",
        ("page", [str(tmp_path)], f"{tmp_path}/report.html", True),
    ]
    report = json.loads((tmp_path / "quickstart.json").read_text())
    assert (report["before"]["0"]["all"]["f1"], report["after"]["0"]["all"]["f1"]) == (0.4, 0.7)
    printed = capsys.readouterr()
    assert f"page  {(tmp_path / 'report.html').as_uri()} " in printed.out
    assert " report " not in printed.out.partition("next:")[2]
    headings = [line.strip("─ ") for line in printed.err.splitlines() if line.startswith("── ")]
    assert [heading[:4] for heading in headings] == ["1/6:", "2/6:", "3/6:", "4/6:", "5/6:", "6/6:", "resu"]
    head, _, row = printed.out.splitlines()[:3]
    assert "F1 before  F1 after  format  searches" in head
    assert row.split() == ["0", "all", "0.400", "0.700", "1.000", "2.000"]
    parts = {name: value for name, value in report["seconds"].items() if name != "total"}
    assert all(value >= 0 for value in parts.values())
    assert sum(parts.values()) == pytest.approx(report["seconds"]["total"], abs=0.5)


def test_without_matplotlib_the_command_of_the_page_is_named(chain, monkeypatch, capsys):
    config, done = chain
    monkeypatch.setattr(quickstart.report_command, "is_installed", lambda: False)
    quickstart.run(config)
    assert "page" not in [entry[0] for entry in done]
    following = capsys.readouterr().out.partition("next:")[2]
    assert "pip install 'calibadv-jax[report]'" in following and " report " in following


def means(f1, valid, searches):
    return {"f1": f1, "format": valid, "searches": searches}


def test_table_compares_every_data_source():
    before = {"0": {"all": means(0.1, 0.2, 1.0), "two_hop": means(0.3, 0.4, 1.5)}}
    after = {"0": {"all": means(0.5, 0.6, 2.0), "two_hop": means(0.7, 0.8, 2.5)}}
    head, _, *rows = quickstart._scores_table(before, after).splitlines()
    assert head.split("  ")[0] == "temperature"
    assert "F1 before  F1 after  format  searches" in head
    assert [row.split() for row in rows] == [
        ["0", "all", "0.100", "0.500", "0.600", "2.000"],
        ["0", "two_hop", "0.300", "0.700", "0.800", "2.500"],
    ]


def test_existing_cold_start_is_checked_and_kept(tmp_path, chain):
    config, done = chain
    with pytest.raises(UserError, match="world.dir is empty"):
        quickstart.run(replace(config, world=replace(config.world, dir="")))
    assert done == []
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/config.json").write_text("{}")
    quickstart.run(config)
    assert done[:2] == ["world", "cold start checked"] and "cold start" not in done
