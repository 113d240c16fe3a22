"""Build the documentation site from README, docs/, experiments/ and benchmarks/, with an API reference.

python -m scripts.build_docs                  # into build/site; needs the extra `docs`
python -m scripts.build_docs --output FOLDER

The pages are those that people read in the repository. The navigation follows the reading paths of
docs/README.md. Every warning is an error: a dead link or anchor, a page outside of the navigation, a
docstring that names an argument which its function does not have.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "docs" / "mkdocs.yml"
COPIED = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
    "requirements/cpu.txt",
)
# Folders of pages, and the kinds of files that pages of them show or link to.
FOLDERS = ("docs", "experiments", "benchmarks", "examples")
ENDINGS = {".md", ".svg", ".png", ".py", ".ipynb"}
LISTED = re.compile(r"^\d+\. \[[^\]]+\]\(([^)]+)\)", re.MULTILINE)
# Page of the API reference -> its modules: what a user's own code imports, subclasses or is given.
API = {
    "Trajectories and interfaces": ("calibadv_jax.core.trajectory", "calibadv_jax.core.interfaces"),
    "Advantages": (
        "calibadv_jax.advantages.estimators",
        "calibadv_jax.advantages.baselines",
        "calibadv_jax.advantages.score_estimators",
        "calibadv_jax.advantages.turn_rewards",
        "calibadv_jax.advantages.gae",
        "calibadv_jax.advantages.calibadv",
        "calibadv_jax.advantages.credit",
        "calibadv_jax.advantages.external",
    ),
    "Losses": ("calibadv_jax.learner.losses", "calibadv_jax.learner.objective"),
    "Learner": ("calibadv_jax.learner.learner", "calibadv_jax.learner.batching"),
    "Policy": ("calibadv_jax.policy.architecture", "calibadv_jax.policy.transformer"),
    "Kept trajectories": ("calibadv_jax.rollout_store.reader", "calibadv_jax.rollout_store.schema"),
    "Retriever": ("retriever.interfaces", "retriever.indexes.backend"),
}


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ValueError:  # a module that a test has removed
        return False


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    first = page.read_text(encoding="utf-8").lstrip().splitlines()[0]
    return first.lstrip("# ").replace("`", "")


def reading_paths() -> dict[str, list[str]]:
    """Return the pages of each reading path of docs/README.md, by its heading; paths from the root."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    paths = {}
    for section in text.split("\n## ")[1:]:
        heading = section.splitlines()[0]
        paths[heading] = [f"docs/{name}" for name in LISTED.findall(section)]
    return paths


def copy_pages(source: Path) -> None:
    """Copy the pages, and the images and programs that they show, to a new folder `source`."""
    source.mkdir(parents=True)
    for name in COPIED:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in ENDINGS and "__pycache__" not in path.parts:
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


def write_api(source: Path) -> list[dict[str, str]]:
    """Write a page for each entry of API, and return their navigation."""
    navigation = []
    (source / "api").mkdir()
    for title, modules in API.items():
        name = f"api/{title.lower().replace(' ', '_')}.md"
        blocks = "\n\n".join(f"::: {module}" for module in modules)
        (source / name).write_text(f"# {title}\n\n{blocks}\n", encoding="utf-8")
        navigation.append({title: name})
    return navigation


def write_settings(source: Path, site: Path, api: list[dict[str, str]]) -> Path:
    """Write the settings with the navigation beside the folder of the pages, and return the file."""
    navigation: list[dict[str, Any]] = [{"Overview": "README.md"}, {"All pages": "docs/README.md"}]
    for heading, pages in reading_paths().items():
        navigation.append({heading: [{title_of(ROOT / page): page} for page in pages]})
    for folder in ("experiments", "benchmarks"):
        pages = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.md"))
        navigation.append({folder.capitalize(): [{title_of(ROOT / page): page} for page in pages]})
    navigation.append({"API reference": api})
    navigation += [{"Rules": "AGENTS.md"}, {"Contributing": "CONTRIBUTING.md"}, {"Changelog": "CHANGELOG.md"}]
    settings: dict[str, Any] = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    settings |= {"docs_dir": str(source), "site_dir": str(site), "nav": navigation}
    for plugin in settings["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    file = source.parent / "mkdocs.yml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return file


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/site", help="default: build/site")
    site = parser.parse_args(argv).output.resolve()
    if not (is_installed("mkdocs") and is_installed("material") and is_installed("mkdocstrings")):
        sys.stderr.write("the site needs MkDocs: pip install -e '.[docs]'\n")
        return 2
    if site.exists() and any(site.iterdir()) and not (site / "objects.inv").is_file():
        sys.stderr.write(
            f"--output {site} holds other files, which the build would delete: name a new folder\n"
        )
        return 2
    with TemporaryDirectory(prefix="calibadv-docs-") as folder:
        source = Path(folder) / "source"
        copy_pages(source)
        settings = write_settings(source, site, write_api(source))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(settings)]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the notice of a successor of the theme
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
