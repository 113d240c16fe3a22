"""The documentation site builds from the pages without a warning."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import build_docs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.medium  # builds every page


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder of the site, and how its build ended."""
    site = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "scripts.build_docs", "--output", str(site)]
    return site, subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_site_builds_without_a_warning(built):
    """A dead link or anchor, a page outside of the navigation, or a wrong docstring would fail the build."""
    site, build = built
    assert build.returncode == 0, build.stderr
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    expected = {"index.html", "docs/calibadv.html", "experiments/qwen.html", "api/advantages.html"}
    assert expected <= pages
    reference = (site / "api/advantages.html").read_text(encoding="utf-8")
    assert "compute_advantages" in reference


def test_dead_link_fails_the_build_over_an_earlier_one(built, tmp_path, monkeypatch, capfd):
    """With one page of the API reference: the build replaces the earlier site, and names the link."""
    copy_pages = build_docs.copy_pages

    def with_dead_link(source: Path) -> None:
        copy_pages(source)
        with (source / "docs/kl.md").open("a", encoding="utf-8") as page:
            page.write("\n[nowhere](nowhere.md)\n")

    monkeypatch.setattr(build_docs, "copy_pages", with_dead_link)
    monkeypatch.setattr(build_docs, "API", {"Losses": build_docs.API["Losses"]})
    site = tmp_path / "site"
    shutil.copytree(built[0], site)
    assert build_docs.main(["--output", str(site)]) not in (0, 2)
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "nowhere.md" in warnings[0]
    assert not (site / "api/advantages.html").exists()


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
