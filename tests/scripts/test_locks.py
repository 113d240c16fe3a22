"""requirements/*.txt: pins that satisfy pyproject.toml on every Python, and no place to fetch from."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    "cpu": ("cpu", "report"),
    "gpu": ("gpu", "dense", "report", "s3", "gcs"),
    "tpu": ("tpu", "report", "s3", "gcs"),
}
PIN = re.compile(r"[a-z0-9-]+(\[[a-z0-9-]+\])?==[\w.]+( ; .+)?")


def requirements_of(extras):
    """The direct requirements of the project with extras, those of its own extras instead of their names."""
    requirements = [Requirement(requirement) for requirement in PROJECT["dependencies"]]
    open_ = list(extras)
    while open_:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][open_.pop()]):
            if requirement.name == PROJECT["name"]:
                open_ += requirement.extras
            else:
                requirements.append(requirement)
    return requirements


def applicable(requirements, python):
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}
    environment = linux | {"python_version": python, "python_full_version": f"{python}.5"}
    environment = default_environment() | environment
    return [item for item in requirements if item.marker is None or item.marker.evaluate(environment)]


@pytest.mark.parametrize("name", EXTRAS)
def test_lock_satisfies_the_project(name):
    lines = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not PIN.fullmatch(line)] == []  # no index, path, option or local build
    for python in ("3.11", "3.12", "3.13"):
        pinned = applicable(map(Requirement, lines), python)
        pins = {canonicalize_name(item.name): str(item.specifier).removeprefix("==") for item in pinned}
        assert len(pins) == len(pinned)  # one version of each
        for requirement in applicable(requirements_of(EXTRAS[name]), python):
            pin = pins.get(canonicalize_name(requirement.name))
            assert pin and requirement.specifier.contains(pin), f"{name}, {python}: {requirement} but {pin}"


def test_every_lock_is_one_that_the_script_writes():
    text = (ROOT / "scripts/lock.sh").read_text(encoding="utf-8")
    calls = [line.split() for line in re.findall(r"(?m)^lock (.*)$", text)]
    assert {name: tuple(extras) for name, *extras in calls} == EXTRAS
    assert sorted(file.stem for file in (ROOT / "requirements").iterdir()) == sorted(EXTRAS)
