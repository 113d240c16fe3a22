"""The pages as a whole: the index has each of them, links and named files exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from test_architecture import FLOORS

from calibadv_jax import cli
from calibadv_jax.config import known_keys, load_config
from calibadv_jax.metrics.catalogue import find_metric

ROOT = Path(__file__).resolve().parents[2]
FOLDERS_OF_PAGES = ("", "docs", "benchmarks", "experiments")
PAGES = [path for folder in FOLDERS_OF_PAGES for path in sorted((ROOT / folder).glob("*.md"))]
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "calibadv_jax|retriever|scripts|tests|configs|benchmarks|docs|examples|experiments"
# Not configs/0.yaml of a run's folder, nor names in capitals, which stand for others.
NAMED = re.compile(rf"`((?:{FOLDERS})/(?!\d)[a-z0-9_./-]+\.(?:py|sh|yaml|md|js))`")
PYTHON_FILES = {path.name for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")}
NAMED_ALONE = re.compile(r"`([a-z0-9_]+\.py)`")


def prose(page):
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """What headings are called in an address, as GitHub makes it."""
    headings = re.findall(r"(?m)^#+ (.*)", prose(page))
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page):
    text, dead = prose(page), []
    for link in LINK.findall(text):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        is_local = not link.startswith(("https://", "http://"))
        if is_local and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    dead += [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    dead += set(NAMED_ALONE.findall(text)) - PYTHON_FILES
    assert not dead


def test_modules_of_the_glossary_exist():
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    files = [line.rpartition(" `")[2].rstrip("`") for line in lines if line.startswith("- ")]
    assert len(files) > 30 and not [name for name in files if not (ROOT / "calibadv_jax" / name).is_file()]


@pytest.mark.parametrize("name", ["troubleshooting.md", "choosing.md", "hardware.md"])
def test_keys_and_metrics_of_a_page_exist(name):
    text = prose(ROOT / "docs" / name)
    keys = set(re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text)) - {"metrics.jsonl", "retriever.log"}
    assert not [key for key in keys if key not in known_keys()]
    metrics = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)(?:/<\w+>)?`", text))
    assert not [metric for metric in metrics if not (find_metric(metric) or find_metric(f"{metric}/x"))]


def test_commands_of_the_readme_work():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = CODE.findall(text)
    commands = {line.split("#")[0].strip() for block in blocks for line in block.splitlines()[1:-1]}
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= commands
    arguments = re.findall(r"(?:calibadv \w+ |run=\")(--config [^#\"\n]*)", text)
    assert len(arguments) >= 3
    for words in map(shlex.split, arguments):
        parsed = cli.parse("calibadv train", "", words)
        load_config([ROOT / path for path in parsed.configs], parsed.overrides)


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
    assert commands == ["scripts/test.sh", "scripts/test.sh --slow"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all((ROOT / package / "py.typed").is_file() for package in ("calibadv_jax", "retriever"))
