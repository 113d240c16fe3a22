"""Reads a config from a YAML file and ``key.path=value`` overrides; says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from calibadv_jax.config.keys import known_keys, nearest
from calibadv_jax.config.root import Config
from calibadv_jax.errors import UserError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.path=value`` overrides.

    Raises:
        UserError: missing file, bad YAML, unknown key (with the nearest known one), bad value.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such config file; the shipped ones are in configs/")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"override {override!r} is not of the form key.path=value")
    # Defaults come first, so that an interpolation may name a key which the file leaves alone.
    defaults = OmegaConf.create(dataclasses.asdict(Config()))
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UserError(f"{path}: expected a mapping of sections, got a list")
        given = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        _refuse_unknown(OmegaConf.to_container(given), path)
        merged = OmegaConf.to_container(OmegaConf.merge(defaults, given), resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    return _validate(merged, path)


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every key written out."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _refuse_unknown(given: Any, path: Path) -> None:
    keys = known_keys()

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            dotted = f"{prefix}{name}"
            if dotted not in keys:
                meant = nearest(dotted)
                hint = f"; did you mean {meant!r}?" if meant else ""
                raise UserError(f"{path}: unknown key {dotted!r}{hint}")
            if is_pydantic_dataclass(keys[dotted]) and isinstance(value, dict):
                walk(value, f"{dotted}.")

    walk(given, "")


def _validate(merged: Any, path: Path) -> Config:
    try:
        # As JSON, since strict validation (no text for a number, no number for a bool) of Python values
        # would refuse a mapping for a section.
        return TypeAdapter(Config).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'config'}: {_wording(item['msg'])}"
            + ("" if isinstance(item["input"], dict) else f" (got {item['input']!r})")
            for item in error.errors()
        ]
        raise UserError(f"{path}: {'; '.join(lines)}") from error


def _wording(message: str) -> str:
    """Pydantic's words as a demand: "Input should be greater than 0" -> "must be greater than 0"."""
    return message.removeprefix("Value error, ").replace("Input should be", "must be")
