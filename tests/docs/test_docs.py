"""The pages as a whole: the index has each of them, links and named files exist."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from test_architecture import FLOORS

from calibadv_jax.config import known_keys
from calibadv_jax.metrics.catalogue import find

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "experiments").glob("*.md")),
]
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "calibadv_jax|retriever|scripts|tests|configs|benchmarks|docs|experiments"
# Not configs/0.yaml of a run's folder, nor names in capitals, which stand for others.
NAMED = re.compile(rf"`((?:{FOLDERS})/(?!\d)[a-z0-9_./-]+\.(?:py|sh|yaml|md|js))`")
NAMED_ALONE = re.compile(r"`([a-z0-9_]+\.py)`")


def prose(page):
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """What headings are called in an address, as GitHub makes it."""
    headings = re.findall(r"(?m)^#+ (.*)", prose(page))
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_file_exists(page):
    assert not [name for name in NAMED.findall(prose(page)) if not (ROOT / name).exists()]


def test_python_files_named_without_folder_exist():
    folders = ("calibadv_jax", "retriever", "scripts", "tests", "benchmarks", "examples", "experiments")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert not [
        (page.name, name) for page in PAGES for name in NAMED_ALONE.findall(prose(page)) if name not in names
    ]


def test_modules_of_the_glossary_exist():
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    terms = [line for line in lines if line.startswith("- ")]
    assert len(terms) > 30
    missing = [
        line for line in terms if not (ROOT / "calibadv_jax" / line.rpartition(" `")[2].rstrip("`")).is_file()
    ]
    assert not missing


@pytest.mark.parametrize("name", ["troubleshooting.md", "choosing.md", "hardware.md"])
def test_keys_and_metrics_of_a_page_exist(name):
    text = prose(ROOT / "docs" / name)
    keys = set(re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text)) - {"metrics.jsonl", "retriever.log"}
    assert not [key for key in keys if key not in known_keys()]
    metrics = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)(?:/<\w+>)?`", text))
    assert not [metric for metric in metrics if not (find(metric) or find(f"{metric}/x"))]


def test_index_has_each_page_once():
    listed = LINK.findall((ROOT / "docs/README.md").read_text(encoding="utf-8"))
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert sorted(listed) == sorted([*pages, "../README.md"])


def test_table_of_packages_is_complete():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.split("\n## Packages\n")[1].split("\n## ")[0]
    package = ROOT / "calibadv_jax"
    folders = [f"`calibadv_jax/{init.parent.name}/`" for init in package.glob("*/__init__.py")]
    modules = [f"`{path.name}`" for path in package.glob("*.py") if not path.name.startswith("__")]
    assert folders and modules
    assert not [name for name in folders + modules if name not in table]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    stated = {name: int(floor) for floor, names in rows for name in re.findall(r"calibadv_jax/(\w+)/", names)}
    assert stated == {name: floor for floor, names in enumerate(FLOORS, 1) for name in names}


def test_root_files_parse_and_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation, hooks, workflow = (
        yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
        for name in ("CITATION.cff", ".pre-commit-config.yaml", ".github/workflows/test.yml")
    )
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert f"ruff=={hooks['repos'][0]['rev'].removeprefix('v')}" in project["optional-dependencies"]["dev"]
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == ["scripts/test.sh"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all((ROOT / package / "py.typed").is_file() for package in ("calibadv_jax", "retriever"))


def test_reliability_page_names_tests_that_exist():
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    section = text.split("\n## What stops a run")[1].split("\n## ")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)`", section)
    assert named and not [name for name in named if not (ROOT / name).is_file()]
