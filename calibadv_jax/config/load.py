"""Read configs from YAML files and ``key.path=value`` overrides, and write them.

OmegaConf merges and resolves the files, and pydantic checks the types. An error is one line that names the
file and the key. A config that is written holds its references to the environment, ``${oc.env:NAME}``, and
not the values of the variables.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from calibadv_jax.config.kept import (
    folder_of_kept,
    follow_run,
    map_texts,
    rebase_paths,
    run_that_kept,
)
from calibadv_jax.config.keys import drop_removed, keys_with_mark, refuse_unknown, rename_old_keys, type_of
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.config.shipped import find_config
from calibadv_jax.config.trust import Deed, Trust, refuse_deeds, without_environment
from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.core.secrets import redact, remember

# Name of the source of overrides.
COMMAND_LINE = "command line"
# Key of a file that builds upon another file.
BASE = "base"
# Options that only the retrieval service has: a file with them is a config of the service.
SERVICE_OPTIONS = ("corpus_path", "index_path", "retriever_name")
# A reference to an environment variable that is not escaped; group 1 is the variable's name.
REFERENCE = re.compile(r"(?<!\\)\$\{\s*oc\.env:\W*(\w+)[^{}]*\}")

# (dotted key, value) -> the text that refers to the environment and has this value.
_references: dict[tuple[str, str], str] = {}


class Source(NamedTuple):
    """A source of values.

    Attributes:
        name: File, or COMMAND_LINE.
        keys: Dotted names of the keys and sections that it sets.
    """

    name: str
    keys: set[str]


def load_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    with_inputs: bool = False,
    trust: Trust | None = None,
) -> Config:
    """Read a config from YAML files, each over the file before it, and from overrides.

    The key ``base`` of a file names the file that it builds upon, relative to its own folder, or a shipped
    config. Sections merge key by key; a list replaces a list. An interpolation sees the final values. In a
    file that a run has kept, the paths inside the run's folder are taken in the folder's present place, and
    they follow run.dir if it is overridden.

    The type of an override's key decides how its value is read. Text is taken literally, except for quotes
    around it, so that run.dir=2026_11_21 is not a number. Everything else is YAML.

    Args:
        paths: A file or several, or names of shipped configs.
        overrides: Overrides ``key.path=value``; later ones win.
        with_inputs: Whether inputs follow an overridden run.dir too; see `follow_run`.
        trust: What the command may do with a file that a run has kept, and with the files that it builds
            upon; None: nothing that docs/security.md lists.

    Raises:
        UserError: A file is missing or not YAML, a key is unknown, a value cannot work, or the config of a
            run would do what `trust` does not cover.
    """
    names = [paths] if isinstance(paths, str | Path) else paths
    files: list[tuple[str, DictConfig]] = []
    trust = trust or Trust()
    folders = dict(trust.folders)
    for name in names:
        files_of_name = list(_read(find_config(Path(name)), ()))
        files += files_of_name
        folders |= _folders_of_kept(files_of_name)
    return _merge(files, overrides, with_inputs, dataclasses.replace(trust, folders=folders))


def _folders_of_kept(files: Sequence[tuple[str, DictConfig]]) -> dict[str, Path]:
    """Return the folder of the run that has kept a file, or a file that builds upon it, by the file's name.

    Args:
        files: Names and values of files, each of which builds upon those before it.
    """
    folders = {}
    folder = None
    for name, _ in reversed(files):
        folder = folder_of_kept(Path(name)) or folder
        if folder is not None:
            folders[name] = folder
    return folders


def parse_config(text: str, name: str, overrides: Sequence[str] = (), trust: Trust | None = None) -> Config:
    """Return the config in a text that a run has kept; keys of earlier versions get their present names.

    Args:
        text: YAML or JSON of a config.
        name: Name of the file that holds the text, for messages. It lies in a folder of the run's folder.
        overrides: Overrides ``key.path=value``; see `load_config`.
        trust: As for `load_config`.

    Raises:
        UserError: As `load_config`.
    """
    folders = {name: Path(name).absolute().parent.parent}
    with _errors_of(name):
        loaded = _checked(OmegaConf.create(text), name, is_kept=True)
    return _merge(
        [(name, loaded)],
        overrides,
        with_inputs=False,
        trust=dataclasses.replace(trust or Trust(), folders=folders),
    )


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML, every key written out; see `kept_values`."""
    return yaml.safe_dump(kept_values(config), sort_keys=False)


def kept_values(config: Config) -> dict[str, Any]:
    """Return the nested values of a config as they are kept.

    Values from the environment become references, and secrets are redacted. Text that looks like a reference
    is escaped, so that reading the values again gives the same config.
    """
    # Defaults that refer to other keys are not resolved in a config that was not loaded.
    default_references = re.findall(r"'(\$\{[^']*)'", str(dataclasses.asdict(Config())))

    def keep(key: str, text: str) -> str:
        reference = _references.get((key, text), text)
        is_plain = reference == text and text not in default_references
        if not is_plain:
            return reference
        escaped = text.replace("${", "\\${")
        return redact(escaped)

    values: dict[str, Any] = map_texts(dataclasses.asdict(config), keep)
    return values


def with_references(values: Any) -> Any:
    """Return nested values of a config with references in place of the values from the environment."""

    def to_reference(key: str, text: str) -> str:
        return _references.get((key, text), text)

    return map_texts(values, to_reference)


def _merge(
    files: Sequence[tuple[str, DictConfig]], overrides: Sequence[str], with_inputs: bool, trust: Trust
) -> Config:
    """Merge named files, each over the file before it, and overrides over all files."""
    files, references = _without_environment(files, trust)
    merged, sources = _resolve(files, overrides)
    run_dir = str(merged["run"]["dir"])
    run_dir_setter = _last_setter("run.dir", sources)
    followed: list[tuple[str, DictConfig]] = []
    # The values, before they followed run.dir, of the files that had another one.
    moved: dict[str, DictConfig] = {}
    for name, loaded in files:
        values = loaded
        if name != run_dir_setter:
            values = _follow_run_dir(loaded, run_dir, with_inputs)
        if values is not loaded:
            moved[name] = loaded
        followed.append((name, values))
    if moved:
        merged, sources = _resolve(followed, overrides)
        _check_mirror(merged["run"], moved, sources)

    def setters(key: str) -> set[str]:
        return _last_setters(key, sources)

    try:
        config = _validate(merged, sources)
    except UserError:
        # A value may be wrong because its reference was taken out: name the reference first.
        refuse_deeds(trust, None, references, setters)
        raise
    refuse_deeds(trust, config, references, setters)
    return config


def _without_environment(
    files: Sequence[tuple[str, DictConfig]], trust: Trust
) -> tuple[list[tuple[str, DictConfig]], list[Deed]]:
    """Take the references to the environment from the files of runs that the user has not trusted.

    Returns:
        The files; and what they would have read.
    """
    literal_files = []
    references: list[Deed] = []
    for name, loaded in files:
        values = loaded
        if trust.is_asked_about(name):
            literal, deeds = without_environment(OmegaConf.to_container(loaded))
            values = OmegaConf.create(literal)
            references += deeds
        literal_files.append((name, values))
    return literal_files, references


def _last_setters(key: str, sources: Sequence[Source]) -> set[str]:
    """Return the names of the sources that set a key last, or the keys inside it; none for a default.

    A file sets a list as a whole: of an element that no override sets, the list counts.
    """
    names = {_last_setter(key, sources)}
    list_key = re.split(r"\.\d+\b", key, maxsplit=1)[0]
    if names == {""}:
        names = {_last_setter(list_key, sources)}
    for source in sources:
        for inner_key in source.keys:
            if inner_key.startswith(f"{key}."):
                names.add(_last_setter(inner_key, sources))
    return names - {""}


def _last_setter(key: str, sources: Sequence[Source]) -> str:
    """Return the name of the last source that sets a key; empty if none does."""
    for source in reversed(sources):
        if key in source.keys:
            return source.name
    return ""


def _follow_run_dir(loaded: DictConfig, run_dir: str, with_inputs: bool) -> DictConfig:
    """Return a file's values for a run in the folder `run_dir`; `loaded` itself if they do not change."""
    values: Any = OmegaConf.to_container(loaded)
    own_run_dir = (values.get("run") or {}).get("dir")
    if not isinstance(own_run_dir, str) or Path(own_run_dir).resolve() == Path(run_dir).resolve():
        return loaded
    return OmegaConf.create(follow_run(values, run_dir, keys_with_mark(Mark.OUTPUT), with_inputs))


def _check_mirror(run: Any, moved: Mapping[str, DictConfig], sources: Sequence[Source]) -> None:
    """Refuse the mirror of the run that kept a file, from which another run.dir would fetch that run."""
    name = _last_setter("run.mirror", sources)
    mirror = run["mirror"]
    if not mirror or name not in moved or run_that_kept(Path(name)) is None:
        return
    if mirror == moved[name].run.mirror:
        raise UserError(
            f"{name}: run.mirror={mirror} belongs to the run that kept this file; for run.dir={run['dir']} "
            "set run.mirror to another place, or to nothing: run.mirror="
        )


def _resolve(files: Sequence[tuple[str, DictConfig]], overrides: Sequence[str]) -> tuple[Any, list[Source]]:
    """Return the nested values of files and overrides, and their sources."""
    # Defaults come first, so that an interpolation may name a key that no file sets.
    config = copy.deepcopy(_defaults())
    sources = []
    for name, loaded in files:
        with _errors_of(name):
            config.merge_with(loaded)
        sources.append(Source(name, _dotted_names(OmegaConf.to_container(loaded))))
    for override in overrides:
        key = _apply_override(config, override)
        sources.append(Source(COMMAND_LINE, {key}))
    with _errors_of(_all_files(sources)):
        resolved = OmegaConf.to_container(config, resolve=True)
    _note_references(config, resolved)
    return resolved, sources


@functools.cache
def _defaults() -> DictConfig:
    """Return the default of every key. Copy it before a change: copying takes less than making it."""
    return OmegaConf.create(dataclasses.asdict(Config()))


def _read(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[str, DictConfig]]:
    """Yield the name and the values of the files that a file builds upon, and then of the file itself.

    `above` are the files that build upon this file.
    """
    if not path.is_file():
        referrer = f" ({BASE} of {above[-1]})" if above else ""
        raise UserError(f"{path}: no such config file{referrer}; calibadv configs lists the shipped ones")
    if path.resolve() in [file.resolve() for file in above]:
        raise UserError(f"{path}: builds upon itself ({BASE} of {above[-1]}); correct one of the two")
    with _errors_of(str(path)):
        loaded = OmegaConf.load(path)
        if folder_of_kept(path) and OmegaConf.is_dict(loaded) and OmegaConf.is_interpolation(loaded, BASE):
            raise UserError(
                f"{path}: {BASE} of a config in a run's folder must be the name of a file, without ${{…}}"
            )
        base = loaded.pop(BASE, "") if isinstance(loaded, DictConfig) else ""
        if not isinstance(base, str):
            raise UserError(f"{path}: {BASE} is {base!r}, but must be the name of one config file")
        run = run_that_kept(path)
        checked = _checked(loaded, str(path), is_kept=run is not None)
        if run is not None:
            values: Any = OmegaConf.to_container(checked)
            checked = OmegaConf.create(rebase_paths(values, run))
    if base:
        yield from _read(_find_base(base, path.parent), (*above, path))
    yield str(path), checked


def _find_base(base: str, folder: Path) -> Path:
    """Return the file that `base` names, relative to `folder`, or else the shipped config of that name."""
    path = folder / base
    shipped_path = find_config(Path(base))
    if shipped_path.is_file() and not path.is_file():
        return shipped_path
    return path


def _checked(loaded: Any, name: str, is_kept: bool = False) -> DictConfig:
    """Return a file's values if they are a mapping of known sections and keys.

    A file that a run has kept (`is_kept`) may use the key names of an earlier version.
    """
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{name}: expected a mapping of sections, got a list")
    options = [option for option in SERVICE_OPTIONS if option in loaded]
    if options:
        raise UserError(
            f"{name}: holds options of the retrieval service ({', '.join(options)}); "
            f"start the service with it: calibadv retriever --config {name}"
        )
    values: Any = OmegaConf.to_container(loaded)
    drop_removed(values)
    if is_kept:
        rename_old_keys(values)
    refuse_unknown(values, name)
    return OmegaConf.create(values)


def _apply_override(config: DictConfig, override: str) -> str:
    """Set the value of ``key.path=value`` and return the key."""
    key, equals, text = override.partition("=")
    if not key or not equals:
        raise UserError(f"override {override!r} is not of the form key.path=value")
    with _errors_of(f"{COMMAND_LINE}: {override}"):
        key_type = type_of(key)
        value = _parse_value(text, key_type)
        only_override = OmegaConf.create()
        OmegaConf.update(only_override, key, value)
        refuse_unknown(OmegaConf.to_container(only_override), COMMAND_LINE)
        # A key of a union type may have a text, a list or a mapping in the file: replace it, whatever it is.
        is_union = isinstance(key_type, UnionType)
        OmegaConf.update(config, key, value, merge=not is_union)
    return key


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """Turn errors of YAML and OmegaConf into a UserError that names the source of the text."""
    try:
        yield
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: not valid YAML: {one_line(error)}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{source}: {one_line(error)}") from error


def _parse_value(text: str, kind: Any) -> Any:
    """Return the value of an override whose key has type `kind`; interpolations are not resolved."""
    options = typing.get_args(kind) if isinstance(kind, UnionType) else ()
    # Such as str | list[str]: a text, or a collection of texts or numbers.
    may_be_text = str in options
    is_collection = text.lstrip()[:1] in ("[", "{")
    is_text = kind is str or typing.get_origin(kind) is Literal or (may_be_text and not is_collection)
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_text and not is_quoted:
        return text
    holds_only_texts = kind == list[str] or (may_be_text and dict[str, float] not in options)
    if is_text or holds_only_texts:
        # The base loader reads every scalar as text.
        return yaml.load(text, Loader=yaml.BaseLoader)
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return parsed["value"]


def _note_references(config: DictConfig, resolved: Any) -> None:
    """Remember which of the nested values `resolved` come from the environment, in whole or in part.

    Args:
        config: Merged values, whose interpolations are not resolved.
        resolved: The same values, resolved.
    """
    raw = OmegaConf.to_container(config)
    if "oc.env" not in str(raw):
        return
    # Its interpolations of the environment resolve to the references themselves, and not to values.
    escaped = OmegaConf.create(map_texts(raw, _escape_references))
    raw_texts = _texts_by_key(raw)
    values = _texts_by_key(resolved)
    for key, text in raw_texts.items():
        if key not in values or "${" not in text:
            continue
        value = values[key]
        is_escaped = value == text.replace("\\${", "${")  # a text that only looks like a reference
        if not is_escaped:
            _references[key, value] = _reference(escaped, key, text, value)


def _texts_by_key(nested: Any) -> dict[str, str]:
    """Return every text in nested values by its dotted key."""
    texts: dict[str, str] = {}

    def collect(key: str, text: str) -> str:
        return texts.setdefault(key, text)

    map_texts(nested, collect)
    return texts


def _reference(escaped: Any, key: str, text: str, value: str) -> str:
    """Return a text with references that resolves to `value`; `value` itself if it refers to no variable."""
    try:
        reference = OmegaConf.select(escaped, key)
        if "oc.env" not in text and reference == value:
            return value
        resolved_reference = OmegaConf.create({"value": reference}).value
        return str(reference) if resolved_reference == value else text
    except OmegaConfBaseException:
        # A reference inside another resolver cannot be escaped.
        return text


def _escape_references(_: str, text: str) -> str:
    """Escape the references of a text to the environment, and remember the secrets among their values."""
    for name in REFERENCE.findall(text):
        value = os.environ.get(name)
        if value:
            remember(name, value)
    return REFERENCE.sub(r"\\\g<0>", text)


def _validate(merged: Any, sources: Sequence[Source]) -> Config:
    try:
        # Values are validated as JSON: strict validation (no text for a number, no number for a bool) of
        # Python values would refuse a mapping in place of a section's dataclass.
        return TypeAdapter(Config).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        raise UserError(_describe_faults(error, sources)) from error
    except TypeError as error:
        raise UserError(
            f"{_all_files(sources)}: {error}: values are text, numbers, true, false, null, lists and mappings"
        ) from error


def _describe_faults(error: ValidationError, sources: Sequence[Source]) -> str:
    """Return all faults of a config as one line, by the file that set the value."""
    overridden: set[str] = set()
    for source in sources:
        if source.name == COMMAND_LINE:
            overridden |= source.keys
    faults_by_file: dict[str, list[str]] = {}
    for fault in error.errors():
        file = _file_of_fault(fault, sources)
        faults_by_file.setdefault(file, []).append(_describe_fault(fault, overridden))
    return "; ".join(f"{file}: {'; '.join(faults)}" for file, faults in faults_by_file.items())


def _dotted_names(node: Any, prefix: str = "") -> set[str]:
    """Return the dotted names of the keys and sections that a file sets."""
    names: set[str] = set()
    if isinstance(node, dict):
        for name, value in node.items():
            dotted = f"{prefix}{name}"
            names.add(dotted)
            names |= _dotted_names(value, f"{dotted}.")
    return names


def _all_files(sources: Sequence[Source]) -> str:
    files = [source.name for source in sources if source.name != COMMAND_LINE]
    return " + ".join(dict.fromkeys(files))


def _file_of_fault(fault: ErrorDetails, sources: Sequence[Source]) -> str:
    """Return the file that set a value last.

    Of a section they are all files that set one of its keys. If no file sets the value, or the command line
    does, they are all files.
    """
    path = [str(part) for part in fault["loc"]]
    while path:
        # A file sets a list as a whole: if it does not set the key of an element, look for the list.
        key = ".".join(path)
        setters = [source for source in sources if key in source.keys]
        if setters and setters[-1].name == COMMAND_LINE:
            break
        if setters:
            is_section = isinstance(fault["input"], dict)
            return _all_files(setters) if is_section else setters[-1].name
        path.pop()
    return _all_files(sources)


def _describe_fault(fault: ErrorDetails, overridden: Set[str]) -> str:
    """Return a fault as ``learner.steps: must be greater than 0 (got 0)``."""
    key = ".".join(str(part) for part in fault["loc"])
    is_overridden = key in overridden
    demand = _demand(fault, is_overridden)
    line = f"{key}: {demand}" if key else demand
    value = fault["input"]
    if isinstance(value, dict):
        # The message of a rule between a section's keys holds their values already.
        return line
    place = f" on the {COMMAND_LINE}" if is_overridden else ""
    return f"{line} (got {json.dumps(value)}{place})"


def _demand(fault: ErrorDetails, is_overridden: bool) -> str:
    """Return what a value has to be."""
    fault_type = fault["type"]
    value = fault["input"]
    if fault_type == "unexpected_keyword_argument":
        return "unknown key"
    if fault_type == "dataclass_type":
        return "must be a section with keys of its own; leave it out for the defaults"
    if fault_type == "list_type":
        return "must be a list, such as [a, b]"
    demand = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    # On the command line, text has no quotes.
    is_quoted_text = isinstance(value, str) and not is_overridden
    if fault_type in ("int_type", "float_type", "bool_type") and is_quoted_text:
        return f"{demand}, without quotes"
    if fault_type == "literal_error" and isinstance(value, bool):
        return f"{demand}, in quotes: YAML takes on and off, yes and no for true and false"
    if fault_type == "string_type" and isinstance(value, int | float):
        return f"{demand}: put the value in quotes"
    return demand
