"""Reads configs from YAML files and ``key.path=value`` overrides, and writes them.

What is kept of a config has its references to the environment, ``${oc.env:NAME}``, and not their values.
OmegaConf merges and resolves, pydantic checks the types; errors are one line that names the file and the key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from calibadv_jax.config.kept import follow_run, map_texts, rebase_paths, run_of
from calibadv_jax.config.keys import drop_removed, marked, refuse_unknown, rename_old_keys, type_of
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.config.shipped import find_config
from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.core.secrets import redact, remember

COMMAND_LINE = "command line"
BASE = "base"  # key of a file that builds upon another file
REFERENCE = re.compile(r"(?<!\\)\$\{\s*oc\.env:\W*(\w+)[^{}]*\}")

Source = tuple[str, set[str]]  # a file or the command line, and the dotted names of what it sets

_references: dict[tuple[str, str], str] = {}  # (dotted key, value) -> the text that refers to the environment


def load_config(
    paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = (), with_inputs: bool = False
) -> Config:
    """Read YAML files, each over the file before it, and apply ``key.path=value`` overrides.

    A name without a file is that of a shipped config. The key ``base`` of a file names the file beneath it,
    relative to its own folder, or a shipped config. Sections merge key by key; a list replaces a list. An
    interpolation sees the final values. Paths inside the folder of the run that kept a config are taken in
    its present place; if run.dir is overridden, they follow (`with_inputs`: see `follow_run`).

    The type of an override's key decides how its value is read: text is taken literally (but for quotes
    around it), so that run.dir=2026_11_21 is no number; everything else is YAML.

    Raises UserError for a missing file, bad YAML, an unknown key (with a hint), or a bad value.
    """
    names = [paths] if isinstance(paths, str | Path) else paths
    files = [file for name in names for file in _read(find_config(Path(name)), ())]
    return _merged(files, overrides, with_inputs)


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a text (YAML or JSON) of the file `name`; the rest as `load_config`."""
    with _errors_of(name):
        loaded = _checked(OmegaConf.create(text), name)
    return _merged([(name, loaded)], overrides)


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML, every key written out; see `kept_values`."""
    return yaml.safe_dump(kept_values(config), sort_keys=False)


def kept_values(config: Config) -> dict[str, Any]:
    """Return the nested values of a config as they are kept; read again they are the same config."""
    # Of a config that was not loaded.
    defaults = re.findall(r"'(\$\{[^']*)'", str(dataclasses.asdict(Config())))

    def keep(key: str, text: str) -> str:
        reference = _references.get((key, text), text)
        is_plain = reference == text and text not in defaults
        return redact(text.replace("${", "\\${")) if is_plain else reference

    values: dict[str, Any] = map_texts(dataclasses.asdict(config), keep)
    return values


def with_references(values: Any) -> Any:
    """Return nested values of a config with references in place of what comes from the environment."""
    return map_texts(values, lambda key, text: _references.get((key, text), text))


def _merged(
    files: Sequence[tuple[str, DictConfig]], overrides: Sequence[str], with_inputs: bool = False
) -> Config:
    """Merge files, by name, each over the file before it, and overrides over all files."""
    merged, sources = _resolved(files, overrides)
    run, setter = str(merged["run"]["dir"]), _last_setter("run.dir", sources)
    followed = [
        (name, loaded if name == setter else _following(loaded, run, with_inputs)) for name, loaded in files
    ]
    moved = {name: old for (name, old), (_, new) in zip(files, followed, strict=True) if new is not old}
    if moved:
        merged, sources = _resolved(followed, overrides)
        _check_mirror(merged["run"], moved, sources)
    return _validate(merged, sources)


def _last_setter(key: str, sources: Sequence[Source]) -> str:
    return next((name for name, keys in reversed(sources) if key in keys), "")


def _following(loaded: DictConfig, run: str, with_inputs: bool) -> DictConfig:
    """Return a file's values for a run in the folder `run`."""
    values: Any = OmegaConf.to_container(loaded)
    before = (values.get("run") or {}).get("dir")
    if not isinstance(before, str) or Path(before).resolve() == Path(run).resolve():
        return loaded
    return OmegaConf.create(follow_run(values, run, marked(Mark.OUTPUT), with_inputs))


def _check_mirror(run: Any, moved: Mapping[str, DictConfig], sources: Sequence[Source]) -> None:
    """Refuse the mirror of the run that kept a file, from which another run.dir would fetch that run."""
    name, mirror = _last_setter("run.mirror", sources), run["mirror"]
    if mirror and name in moved and run_of(Path(name)) and mirror == moved[name].run.mirror:
        way_out = f"for run.dir={run['dir']} set run.mirror to another place, or to nothing: run.mirror="
        raise UserError(f"{name}: run.mirror={mirror} belongs to the run that kept this file; {way_out}")


def _resolved(files: Sequence[tuple[str, DictConfig]], overrides: Sequence[str]) -> tuple[Any, list[Source]]:
    """Return the nested values of files and overrides, and their sources."""
    # Defaults come first, so that an interpolation may name a key that no file sets.
    config = OmegaConf.create(dataclasses.asdict(Config()))
    sources = []
    for name, loaded in files:
        with _errors_of(name):
            config.merge_with(loaded)
        sources.append((name, _names(OmegaConf.to_container(loaded))))
    for override in overrides:
        sources.append((COMMAND_LINE, {_apply(config, override)}))
    with _errors_of(_all_files(sources)):
        resolved = OmegaConf.to_container(config, resolve=True)
    _note_references(config, resolved)
    return resolved, sources


def _read(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[str, DictConfig]]:
    """Yield the files that a file builds upon, then the file; `above`: the files that build upon it."""
    if not path.is_file():
        by = f" ({BASE} of {above[-1]})" if above else ""
        raise UserError(f"{path}: no such config file{by}; calibadv configs lists the shipped ones")
    if path.resolve() in [file.resolve() for file in above]:
        raise UserError(f"{path}: builds upon itself ({BASE} of {above[-1]}); correct one of the two")
    with _errors_of(str(path)):
        loaded = OmegaConf.load(path)
        base = loaded.pop(BASE, "") if isinstance(loaded, DictConfig) else ""
        if not isinstance(base, str):
            raise UserError(f"{path}: {BASE} is {base!r}, but must be the name of one config file")
        run = run_of(path)
        checked = _checked(loaded, str(path), is_kept=run is not None)
        if run is not None:
            values: Any = OmegaConf.to_container(checked)
            checked = OmegaConf.create(rebase_paths(values, run))
    if base:
        beside, shipped = path.parent / base, find_config(Path(base))
        yield from _read(shipped if shipped.is_file() and not beside.is_file() else beside, (*above, path))
    yield str(path), checked


def _checked(loaded: Any, name: str, is_kept: bool = False) -> DictConfig:
    """Return a file's values if they are a mapping of known sections and keys.

    A file that a run has kept (`is_kept`) may have the names of an earlier version.
    """
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{name}: expected a mapping of sections, got a list")
    values: Any = OmegaConf.to_container(loaded)
    drop_removed(values)
    if is_kept:
        rename_old_keys(values)
    refuse_unknown(values, name)
    return OmegaConf.create(values)


def _apply(config: DictConfig, override: str) -> str:
    """Set the value of ``key.path=value`` and return the key."""
    key, equals, text = override.partition("=")
    if not key or not equals:
        raise UserError(f"override {override!r} is not of the form key.path=value")
    with _errors_of(f"{COMMAND_LINE}: {override}"):
        value = _parse(text, type_of(key))
        alone = OmegaConf.create()
        OmegaConf.update(alone, key, value)
        refuse_unknown(OmegaConf.to_container(alone), COMMAND_LINE)
        # A union is text, a list or a mapping of texts: the file's value of another kind cannot be merged.
        OmegaConf.update(config, key, value, merge=not isinstance(type_of(key), UnionType))
    return key


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """Raise errors of YAML and OmegaConf as one line that names the source of the text."""
    try:
        yield
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: not valid YAML: {one_line(error)}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{source}: {one_line(error)}") from error


def _parse(text: str, kind: Any) -> Any:
    """Return the value of an override whose key has type `kind`; interpolations stay as they are."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_collection = text.lstrip()[:1] in tuple("[{")
    is_paths = isinstance(kind, UnionType) and str in typing.get_args(kind)  # a text, or several
    is_text = kind is str or typing.get_origin(kind) is Literal or (is_paths and not is_collection)
    if is_text and not is_quoted:
        return text
    holds_numbers = isinstance(kind, UnionType) and dict[str, float] in typing.get_args(kind)
    if is_text or (is_paths and not holds_numbers) or kind == list[str]:
        return yaml.load(text, Loader=yaml.BaseLoader)  # every scalar stays text
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return parsed["value"]


def _note_references(config: DictConfig, resolved: Any) -> None:
    """Remember which of the nested values `resolved` come from the environment, in whole or in part."""
    raw = OmegaConf.to_container(config)
    if "oc.env" not in str(raw):
        return
    escaped = OmegaConf.create(map_texts(raw, _escaped))  # resolves to the references themselves

    values: dict[str, str] = {}
    map_texts(resolved, lambda key, value: values.setdefault(key, value))

    def note(key: str, text: str) -> str:
        value = values.get(key)
        if value is not None and "${" in text:
            _references[key, value] = _reference(escaped, key, text, value)
        return text

    map_texts(raw, note)


def _reference(escaped: Any, key: str, text: str, value: str) -> str:
    """Return a text for a key that resolves to `value`; `value` itself if it refers to no variable."""
    try:
        reference = OmegaConf.select(escaped, key)
        if "oc.env" not in text and reference == value:
            return value
        return str(reference) if OmegaConf.create({"value": reference}).value == value else text
    except OmegaConfBaseException:  # a reference within another resolver
        return text


def _escaped(_: str, text: str) -> str:
    """Escape the references of a text, and remember the secrets that they refer to."""
    for name in REFERENCE.findall(text):
        if value := os.environ.get(name):
            remember(name, value)
    return REFERENCE.sub(r"\\\g<0>", text)


def _validate(merged: Any, sources: Sequence[Source]) -> Config:
    try:
        # As JSON, since strict validation (no text for a number, no number for a bool) of Python values
        # would refuse a mapping for a section.
        return TypeAdapter(Config).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        overridden = {key for name, keys in sources if name == COMMAND_LINE for key in keys}
        lines: dict[str, list[str]] = {}
        for fault in error.errors():
            lines.setdefault(_blamed(fault, sources), []).append(_line(fault, overridden))
        raise UserError("; ".join(f"{name}: {'; '.join(texts)}" for name, texts in lines.items())) from error
    except TypeError as error:
        form = "values are text, numbers, true, false, null, lists and mappings"
        raise UserError(f"{_all_files(sources)}: {error}: {form}") from error


def _names(node: Any, prefix: str = "") -> set[str]:
    """Return the dotted names of the keys and sections that a file sets."""
    if not isinstance(node, dict):
        return set()
    names = {f"{prefix}{name}" for name in node}
    return names.union(*(_names(value, f"{prefix}{name}.") for name, value in node.items()))


def _all_files(sources: Sequence[Source]) -> str:
    return " + ".join(dict.fromkeys(name for name, _ in sources if name != COMMAND_LINE))


def _blamed(error: ErrorDetails, sources: Sequence[Source]) -> str:
    """Name the file that set the value last; of a section all files that set a key; all files otherwise."""
    parts = list(map(str, error["loc"]))
    while parts:
        key = ".".join(parts)  # of a list in the file, for what is inside it
        setters = [source for source in sources if key in source[1]]
        if setters and setters[-1][0] == COMMAND_LINE:
            break
        if setters:
            return _all_files(setters) if isinstance(error["input"], dict) else setters[-1][0]
        parts.pop()
    return _all_files(sources)


def _line(error: ErrorDetails, overridden: Set[str]) -> str:
    """``learner.steps: must be greater than 0 (got 0)``"""
    key = ".".join(map(str, error["loc"]))
    demand = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if error["type"] == "unexpected_keyword_argument":
        demand = "unknown key"
    if error["type"] == "dataclass_type":
        demand = "must be a section with keys of its own; leave it out for the defaults"
    is_quoted = isinstance(error["input"], str) and key not in overridden  # a command line needs no quotes
    if error["type"] in ("int_type", "float_type", "bool_type") and is_quoted:
        demand += ", without quotes"
    if error["type"] == "list_type":
        demand = "must be a list, such as [a, b]"
    if error["type"] == "literal_error" and isinstance(error["input"], bool):
        demand += ", in quotes: YAML takes on and off, yes and no for true and false"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        demand += ": put the value in quotes"
    line = f"{key}: {demand}" if key else demand
    if isinstance(error["input"], dict):  # a whole section: the message has the values
        return line
    place = f" on the {COMMAND_LINE}" if key in overridden else ""
    return f"{line} (got {json.dumps(error['input'])}{place})"
