"""What the README shows is true: its commands, its files; and it is short."""

import re
import shlex
from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.config import load_config

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_set_up_is_two_commands():
    section = TEXT.split("\n## Set up\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    commands = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    assert commands == ["scripts/quickstart.sh", "scripts/test.sh"]


COMMAND = re.compile(r"(?:calibadv \w+ |run=\")(--config [^#\"\n]*)")


@pytest.mark.parametrize("arguments", COMMAND.findall(TEXT))
def test_command_lines_have_known_keys(arguments):
    parsed = cli.parse("calibadv train", "", shlex.split(arguments))
    load_config([ROOT / path for path in parsed.configs], parsed.overrides)


def test_readme_shows_commands():
    assert len(COMMAND.findall(TEXT)) >= 3


def test_readme_length():
    assert len(TEXT.split()) <= 900
