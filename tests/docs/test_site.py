"""The documentation site builds from the pages without a warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import build_docs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.medium  # builds every page


def test_site_builds_without_a_warning(tmp_path, capfd):
    """A dead link or anchor, a page outside of the navigation, or a wrong docstring would fail the build."""
    status = build_docs.main(["--output", str(tmp_path / "site")])
    output = capfd.readouterr().err
    assert status == 0, output
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    expected = {"index.html", "docs/calibadv.html", "experiments/qwen.html", "api/advantages.html"}
    assert expected <= pages
    reference = (tmp_path / "site/api/advantages.html").read_text(encoding="utf-8")
    assert "compute_advantages" in reference
    assert build_docs.main(["--output", str(tmp_path / "site")]) == 0, (
        "a site of an earlier build is replaced"
    )


def test_dead_link_fails_the_build(tmp_path, monkeypatch, capfd):
    copy_pages = build_docs.copy_pages

    def with_dead_link(source: Path) -> None:
        copy_pages(source)
        with (source / "docs/kl.md").open("a", encoding="utf-8") as page:
            page.write("\n[nowhere](nowhere.md)\n")

    monkeypatch.setattr(build_docs, "copy_pages", with_dead_link)
    assert build_docs.main(["--output", str(tmp_path / "site")]) != 0
    assert "nowhere.md" in capfd.readouterr().err


def test_without_the_extra_the_message_names_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", str(ROOT / "no-python"))
    monkeypatch.setitem(sys.modules, "mkdocs", None)
    assert build_docs.main(["--output", str(tmp_path / "site")]) == 2
    assert "pip install -e '.[docs]'" in capfd.readouterr().err


def test_folder_with_other_files_is_refused(tmp_path, capfd):
    """MkDocs empties the folder of the site before it builds."""
    (tmp_path / "notes.txt").write_text("mine")
    assert build_docs.main(["--output", str(tmp_path)]) == 2
    assert f"--output {tmp_path} holds other files" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
