"""Reads a config from YAML files and ``key.path=value`` overrides; says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import json
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

from calibadv_jax.config.kept import follow_run, rebase_paths, run_of
from calibadv_jax.config.keys import marked, refuse_unknown, type_of
from calibadv_jax.config.references import kept_values, note_references
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError

COMMAND_LINE = "command line"
SERVICE_KEYS = ("corpus_path", "index_path", "retriever_name")  # which only the retrieval service has
BASE = "base"  # key of a file that builds upon another file

Source = tuple[str, set[str]]  # a file or the command line, and the dotted names of what it sets

_DEMANDS = {  # pydantic's error type -> a demand with the way out, if pydantic's own words lack it
    "dataclass_type": "must be a section with keys of its own; leave it out for the defaults",
    "string_type": "must be text",
    "list_type": "must be a list, such as [a, b]",
    "unexpected_keyword_argument": "unknown key",
    "dict_type": "must be a mapping of keys to values",
    "int_type": "must be an integer, without quotes",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
}


def load_config(
    paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = (), with_inputs: bool = False
) -> Config:
    """Reads YAML files, each over the file before it, and applies ``key.path=value`` overrides.

    A file may build upon another: its key ``base`` names that file, relative to its own folder. Sections
    merge key by key; a list replaces a list. An interpolation sees the final values. In a config that a run
    kept, paths inside the run's folder are taken in its present place. Where run.dir is overridden, the
    paths of a file that lie inside its run.dir follow; see `follow_run`.

    The type of an override's key decides how its value is read: text stays as it was typed (but
    for quotes around it), so that run.dir=2026_11_21 is no number; everything else is YAML.

    Args:
        with_inputs: see `follow_run`.

    Raises:
        UserError: missing file, bad YAML, unknown key (with the one that was probably meant), bad value.
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    return _merged([file for path in given for file in _read(Path(path), ())], overrides, with_inputs)


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """The config that a text holds, such as a config that a run kept; overrides as for `load_config`.

    Args:
        text: YAML or JSON.
        name: of the file that holds the text, for messages.

    Raises:
        UserError: as for `load_config`.
    """
    with _errors_of(name):
        loaded = _checked(OmegaConf.create(text), name)
    return _merged([(name, loaded)], overrides)


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every key written out; see `kept_values`."""
    return yaml.safe_dump(kept_values(config), sort_keys=False)


def _merged(
    files: Sequence[tuple[str, DictConfig]], overrides: Sequence[str], with_inputs: bool = False
) -> Config:
    """The config of files, by name, each over the file before it, and of overrides over all files."""
    merged, sources = _resolved(files, overrides)
    run = str(merged["run"]["dir"])
    setter = next((name for name, keys in reversed(sources) if "run.dir" in keys), "")
    followed = [
        (name, loaded if name == setter else _following(loaded, run, with_inputs)) for name, loaded in files
    ]
    moved = {name: old for (name, old), (_, new) in zip(files, followed, strict=True) if new is not old}
    if moved:
        merged, sources = _resolved(followed, overrides)
        _check_mirror(merged["run"], moved, sources)
    return _validate(merged, sources)


def _following(loaded: DictConfig, run: str, with_inputs: bool) -> DictConfig:
    """A file's values for a run in the folder `run`."""
    values: Any = OmegaConf.to_container(loaded)
    before = (values.get("run") or {}).get("dir")
    if not isinstance(before, str) or Path(before).resolve() == Path(run).resolve():
        return loaded
    return OmegaConf.create(follow_run(values, run, marked(Mark.OUTPUT), with_inputs))


def _check_mirror(run: Any, moved: Mapping[str, DictConfig], sources: Sequence[Source]) -> None:
    """Refuse the mirror of the run that kept a file, from which another run.dir would take that run."""
    name = next((name for name, keys in reversed(sources) if "run.mirror" in keys), "")
    mirror = run["mirror"]
    if mirror and name in moved and run_of(Path(name)) and mirror == moved[name].run.mirror:
        raise UserError(
            f"{name}: run.mirror={mirror} belongs to the run that kept this file; for"
            f" run.dir={run['dir']} set run.mirror to another place, or to nothing: run.mirror="
        )


def _resolved(files: Sequence[tuple[str, DictConfig]], overrides: Sequence[str]) -> tuple[Any, list[Source]]:
    """The nested values of files and overrides, and where they come from."""
    # Defaults come first, so that an interpolation may name a key which the files leave alone.
    config = OmegaConf.create(dataclasses.asdict(Config()))
    sources = []
    for name, loaded in files:
        with _errors_of(name):
            config.merge_with(loaded)
        sources.append((name, _names(OmegaConf.to_container(loaded))))
    for override in overrides:
        sources.append((COMMAND_LINE, {_apply(config, override)}))
    with _errors_of(_all(sources)):
        resolved = OmegaConf.to_container(config, resolve=True)
    note_references(config, resolved)
    return resolved, sources


def _read(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[str, DictConfig]]:
    """The file after the files that it builds upon; `above`: the files that build upon it."""
    if not path.is_file():
        by = f" ({BASE} of {above[-1]})" if above else ""
        raise UserError(f"{path}: no such config file{by}; the shipped configs are in configs/")
    if path.resolve() in [one.resolve() for one in above]:
        raise UserError(f"{path}: builds upon itself ({BASE} of {above[-1]}); correct one of the two")
    with _errors_of(str(path)):
        loaded = OmegaConf.load(path)
        base = loaded.pop(BASE, "") if isinstance(loaded, DictConfig) else ""
        if not isinstance(base, str):
            raise UserError(f"{path}: {BASE} is {base!r}, but must be the name of one config file")
        checked = _checked(loaded, str(path))
        if run := run_of(path):
            values: Any = OmegaConf.to_container(checked)
            checked = OmegaConf.create(rebase_paths(values, run))
    if base:
        yield from _read(path.parent / base, (*above, path))
    yield str(path), checked


def _checked(loaded: Any, name: str) -> DictConfig:
    """What was read, if it is a mapping of known sections and keys."""
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{name}: expected a mapping of sections, got a list")
    if named := [key for key in SERVICE_KEYS if key in loaded]:
        raise UserError(
            f"{name}: holds options of the retrieval service ({', '.join(named)}), and is no config of a run;"
            f" start the service with it: scripts/launch_retriever.sh --config {name}"
        )
    refuse_unknown(OmegaConf.to_container(loaded), name)
    return loaded


def _apply(config: DictConfig, override: str) -> str:
    """Sets what ``key.path=value`` says; the key."""
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
    return key


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
    holds_numbers = isinstance(kind, UnionType) and dict[str, float] in typing.get_args(kind)
    if is_text or (is_paths and not holds_numbers) or kind == list[str]:
        return yaml.load(text, Loader=yaml.BaseLoader)  # every scalar stays text
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return parsed["value"]


def _validate(merged: Any, sources: Sequence[Source]) -> Config:
    try:
        # As JSON, since strict validation (no text for a number, no number for a bool) of Python values
        # would refuse a mapping for a section.
        return TypeAdapter(Config).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        overridden = {key for name, keys in sources if name == COMMAND_LINE for key in keys}
        lines: dict[str, list[str]] = {}
        for item in error.errors():
            lines.setdefault(_blamed(item, sources), []).append(_line(item, overridden))
        raise UserError("; ".join(f"{name}: {'; '.join(said)}" for name, said in lines.items())) from error
    except TypeError as error:
        raise UserError(
            f"{_all(sources)}: {error}: values are text, numbers, true, false, null, lists and mappings"
        ) from error


def _names(node: Any, prefix: str = "") -> set[str]:
    """Dotted names of what a file sets, sections included."""
    if not isinstance(node, dict):
        return set()
    names = {f"{prefix}{name}" for name in node}
    return names.union(*(_names(value, f"{prefix}{name}.") for name, value in node.items()))


def _all(sources: Sequence[Source]) -> str:
    """Every file, if none can be blamed alone."""
    return " + ".join(dict.fromkeys(name for name, _ in sources if name != COMMAND_LINE))


def _blamed(error: ErrorDetails, sources: Sequence[Source]) -> str:
    """The file that set the value last; all that set something of a section; all if nobody did."""
    parts = list(map(str, error["loc"]))
    while parts:
        key = ".".join(parts)  # of a list in the file, for what is inside it
        setters = [name for name, keys in sources if key in keys]
        if setters[-1:] == [COMMAND_LINE]:
            break
        if setters and isinstance(error["input"], dict):
            return " + ".join(dict.fromkeys(name for name in setters if name != COMMAND_LINE))
        if setters:
            return setters[-1]
        parts.pop()
    return _all(sources)


def _line(error: ErrorDetails, overridden: Set[str]) -> str:
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
