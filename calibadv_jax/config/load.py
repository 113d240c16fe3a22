"""Reads a config from a YAML file and ``key.path=value`` overrides; says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from calibadv_jax.config.keys import refuse_unknown, type_of
from calibadv_jax.config.root import Config
from calibadv_jax.errors import UserError

COMMAND_LINE = "command line"

_DEMANDS = {  # pydantic's error type -> a demand with the way out, where pydantic's own words lack it
    "dataclass_type": "must be a section with keys of its own; leave it out for the defaults",
    "string_type": "must be text",
    "list_type": "must be a list, such as [a, b]",
    "unexpected_keyword_argument": "unknown key",
    "dict_type": "must be a mapping of keys to values",
    "int_type": "must be an integer, without quotes",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.path=value`` overrides.

    The type of an override's key decides how its value is read: text stays as it was typed (but
    for quotes around it), so that run.dir=2026_11_21 is no number; everything else is YAML.

    Raises:
        UserError: missing file, bad YAML, unknown key (with the one that was probably meant), bad value.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such config file; the shipped ones are in configs/")
    # Defaults come first, so that an interpolation may name a key which the file leaves alone.
    config = OmegaConf.create(dataclasses.asdict(Config()))
    with _errors_of(str(path)):
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UserError(f"{path}: expected a mapping of sections, got a list")
        refuse_unknown(OmegaConf.to_container(loaded), str(path))
        config.merge_with(loaded)
    given = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise UserError(f"override {override!r} is not of the form key.path=value")
        with _errors_of(f"{COMMAND_LINE}: {override}"):
            value = _parse(text, type_of(key))
            alone = OmegaConf.create()
            OmegaConf.update(alone, key, value)
            refuse_unknown(OmegaConf.to_container(alone), COMMAND_LINE)
            # One text, a list or a mapping of them: what the file has of another kind cannot be merged.
            OmegaConf.update(config, key, value, merge=not isinstance(type_of(key), UnionType))
        given.append(key)
    with _errors_of(str(path)):
        merged = OmegaConf.to_container(config, resolve=True)
    return _validate(merged, path, given)


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every key written out."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """Errors of YAML and OmegaConf as one line that names where the text came from."""
    try:
        yield
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from error


def _parse(text: str, kind: Any) -> Any:
    """The value of an override whose key has type `kind`; interpolations stay as they are."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_collection = text.lstrip()[:1] in tuple("[{")
    is_paths = isinstance(kind, UnionType) and str in typing.get_args(kind)  # a text, or several
    is_text = kind is str or typing.get_origin(kind) is Literal or (is_paths and not is_collection)
    if is_text and not is_quoted:
        return text
    if is_text or is_paths or kind == list[str]:
        return yaml.load(text, Loader=yaml.BaseLoader)  # every scalar stays text
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return parsed["value"]


def _validate(merged: Any, path: Path, overridden: Sequence[str]) -> Config:
    try:
        # As JSON, since strict validation (no text for a number, no number for a bool) of Python values
        # would refuse a mapping for a section.
        return TypeAdapter(Config).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        lines = [_line(item, overridden) for item in error.errors()]
        raise UserError(f"{path}: {'; '.join(lines)}") from error
    except TypeError as error:
        raise UserError(
            f"{path}: {error}: values are text, numbers, true, false, null, lists and mappings"
        ) from error


def _line(error: ErrorDetails, overridden: Sequence[str]) -> str:
    """``learner.steps: must be greater than 0 (got 0)``"""
    key = ".".join(map(str, error["loc"]))
    demand = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    demand = _DEMANDS.get(error["type"], demand)
    if error["type"] == "literal_error" and isinstance(error["input"], bool):
        demand += ", in quotes: YAML takes on and off, yes and no for true and false"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        demand += ": put the value in quotes"
    line = f"{key}: {demand}" if key else demand
    if isinstance(error["input"], dict):  # a whole section: the message says which values
        return line
    place = f" on the {COMMAND_LINE}" if key in overridden else ""
    return f"{line} (got {json.dumps(error['input'])}{place})"
