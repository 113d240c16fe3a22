"""What a config that a run has kept may do: it may come from somebody else, as runs are shared and published.

Every command that reads a config calls `refuse_deeds`, through `load_config` and `parse_config`. A value that
the user gave, on the command line or in a config of his own, is never asked about. docs/security.md has the
table of all commands.
"""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from calibadv_jax.config.kept import map_texts
from calibadv_jax.config.keys import is_among, keys_with_mark, type_of
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.hub_names import DATASETS, is_cached_model, is_repository
from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.core.user_functions import is_address

# The flag of the command line.
FLAG = "--trust-run"
# Kinds of an index that are read without running code of theirs.
SAFE_KINDS = ("faiss", "jax")
# Links of a run's folder that a refusal names; the others are counted.
NAMED_LINKS = 5
# Addresses that only this machine answers. Anything that two programs could read in two ways is none of them.
_LOOPBACK = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/[\w./%-]*)?", re.IGNORECASE)
_LOOPBACK_HOST = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?):\d+", re.IGNORECASE)
# An interpolation that is not escaped: an even number of backslashes stands before it.
_INTERPOLATION = re.compile(r"(?<!\\)((?:\\\\)*)(\$\{)")
# An interpolation that names another key of the config, and nothing else.
_KEY_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{[A-Za-z_][\w.]*\}")


class Deed(NamedTuple):
    """Something that a command would do because a config says so.

    Attributes:
        key: Dotted key of the config.
        text: The deed, as the end of a sentence that begins with "would".
    """

    key: str
    text: str


@dataclass(frozen=True)
class Uses:
    """The parts of a config that a command uses.

    Attributes:
        sections: Dotted names of sections and keys; none: all.
        without: Dotted names of sections and keys among them that it does not use.
        writes: Keys whose file it writes, although other commands read that file.
    """

    sections: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __contains__(self, key: str) -> bool:
        """Return whether the command uses a key."""
        is_used = not self.sections or is_among(self.sections, key)
        return is_used and not is_among(self.without, key)


# Weights come from the folder of the policy that is asked.
_ASK = Uses(
    ("policy", "mesh", "prompt", "rollout", "sampler", "tools", "tool_calls", "retriever", "checkpoint"),
    ("policy.path", "policy.lora.init_from"),
)
_REPLAY = Uses(("reward", "advantage", "loss", "learner"), ("reward.judge",))
# What a command uses of a config. A command that is not named uses everything.
USES = {
    "ask": _ASK,
    "serve": _ASK,
    "replay": _REPLAY,
    "audit": _REPLAY,
    "evaluate": Uses(
        ("run", "policy", "mesh", "data", "prompt", "rollout", "sampler", "tools", "tool_calls", "retriever")
        + ("reward", "evaluate", "checkpoint"),
        ("data.train", "policy.lora.init_from"),
    ),
    "export": Uses(("run", "export")),
    "coverage": Uses(("run", "data", "retriever")),
    "demonstrate": Uses(
        ("run", "policy", "data", "prompt", "rollout", "tools", "tool_calls", "retriever", "sft"),
        writes=("sft.demonstrations",),
    ),
    "plan": Uses(
        ("policy", "mesh", "rollout", "learner", "critic", "loss", "advantage"),
        ("policy.path", "policy.tokenizer"),
    ),
}


@dataclass(frozen=True)
class Trust:
    """What a command may do with the configs that runs have kept.

    Attributes:
        command: Name of the command; empty: one that uses everything.
        is_given: Whether the user trusts the runs (FLAG).
        folders: Folder of the run that has kept a file, by the file's name; `load_config` adds those that it
            knows by their place. Files of the user's own are missing.
    """

    command: str = ""
    is_given: bool = False
    folders: Mapping[str, Path] = field(default_factory=dict)

    @property
    def uses(self) -> Uses:
        """The parts of a config that the command uses."""
        return USES.get(self.command, Uses())

    def is_asked_about(self, name: str) -> bool:
        """Return whether a file is that of a run which the user has not trusted."""
        return name in self.folders and not self.is_given


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag by which the user trusts the runs whose configs a command reads."""
    parser.add_argument(
        FLAG,
        action="store_true",
        help="let the config of a run import code, start programs, contact addresses, read the environment"
        " and write outside of the run's folder; without it this is refused (docs/security.md)",
    )


def without_environment(values: Any) -> tuple[Any, list[Deed]]:
    """Take from a run's config whatever would read the environment.

    References to other keys stay. Our own kept configs hold no other interpolation than those of the
    environment, so that every other one is treated like them, whatever resolver it names.

    Args:
        values: Nested values of the file; they are not changed.

    Returns:
        The values, in which such a text is literal, or the default where only some words are allowed; and a
        deed for each.
    """
    deeds: list[Deed] = []

    def escape(key: str, text: str) -> str:
        if not _INTERPOLATION.search(_KEY_REFERENCE.sub("", text)):
            return text
        deeds.append(Deed(key, f"fill in {text!r} from the environment"))
        is_choice = typing.get_origin(type_of(key)) is Literal
        is_in_list = any(part.isdecimal() for part in key.split("."))
        if is_choice and not is_in_list:
            default: Any = Config()
            for part in key.split("."):
                default = getattr(default, part)
            return str(default)
        return _INTERPOLATION.sub(r"\1\\\2", text)

    return map_texts(values, escape), deeds


def refuse_deeds(
    trust: Trust, config: Config | None, references: Sequence[Deed], setters: Callable[[str], set[str]]
) -> None:
    """Refuse what the configs of runs would do, unless the user trusts the runs.

    Args:
        trust: The command, and which files are those of runs.
        config: The config; None if the references left none that is valid.
        references: Deeds of `without_environment`.
        setters: Returns the files and other sources that set a key, or a part of it, last.

    Raises:
        UserError: There is something to refuse; the message names all of it.
    """
    kept_files = [name for name in trust.folders if trust.is_asked_about(name)]
    if not kept_files:
        return
    deeds = list(references)
    if config is not None:
        own_folder = "" if setters("run.dir") & set(kept_files) else config.run.dir
        folders = [trust.folders[name] for name in kept_files]
        deeds += _deeds(config, trust.uses, folders, own_folder)
    refused: dict[str, list[str]] = {}
    for deed in deeds:
        setters_of_deed = setters(deed.key) & set(kept_files)
        if deed.key in trust.uses and setters_of_deed:
            name = max(setters_of_deed)
            refused.setdefault(name, []).append(f"{to_printable_line(deed.text)} ({deed.key})")
    if not refused:
        return
    command = f"calibadv {trust.command}" if trust.command else "this command"
    faults = [
        f"{name}: by this config of a run, {command} would {'; '.join(of_file)}"
        for name, of_file in refused.items()
    ]
    raise UserError(
        f"{'. '.join(faults)}. A run may come from somebody else: give these keys yourself, as KEY=VALUE or"
        f" in a config of your own, or add {FLAG} if you trust whoever made the run"
    )


def _deeds(config: Config, uses: Uses, folders: Sequence[Path], own_folder: str) -> Iterator[Deed]:
    """Yield what a command would run, contact, read and write by a config, beyond what every config does.

    Args:
        config: The config.
        uses: What the command uses of it.
        folders: Folders of the runs that have kept its files; writing there is no deed.
        own_folder: run.dir, if the user gave it; empty: he did not.
    """
    yield from _imports(config)
    yield from _programs(config)
    yield from _addresses(config)
    yield from _downloads(config, uses)
    places = [*folders, Path(own_folder)] if own_folder else folders
    yield from _outputs(config, uses, places)
    yield from _index(config, places if "run" in uses else [])
    if not own_folder and "run.dir" in uses:
        yield from _links(config)


def _imports(config: Config) -> Iterator[Deed]:
    """Yield the modules that a config names."""
    for tool in config.tools:
        if is_address(tool.name):
            yield Deed("tools", f"import {tool.name}")
    for name in config.reward.weights:
        if is_address(name):
            yield Deed("reward.answer", f"import {name}")
    for key, name in (
        ("advantage.name", config.advantage.name),
        ("advantage.base", config.advantage.base),
        ("loss.name", config.loss.name),
        ("tool_calls.format", config.tool_calls.format),
    ):
        if is_address(name):
            yield Deed(key, f"import {name}")
    kind = config.retriever.kind
    if kind and kind not in SAFE_KINDS:
        yield Deed("retriever.kind", f"open an index of the kind {kind}, which runs code")


def _programs(config: Config) -> Iterator[Deed]:
    """Yield the programs that a config starts, and the arguments that it gives to vLLM."""
    for tool in config.tools:
        if tool.mcp and tool.mcp.command:
            yield Deed("tools", f"start the program {tool.mcp.command!r}")
    arguments = config.sampler.worker_args
    if arguments and config.sampler.name == "vllm" and not config.sampler.urls:
        yield Deed("sampler.worker_args", f"start vLLM with {' '.join(arguments)!r}")


def _addresses(config: Config) -> Iterator[Deed]:
    """Yield the addresses that a config contacts or listens on."""
    urls = config.retriever.url
    for url in [urls] if isinstance(urls, str) else urls:
        yield from _contact("retriever.url", url, "RETRIEVER_TOKEN")
    for tool in config.tools:
        if tool.mcp and tool.mcp.url:
            yield from _contact("tools", tool.mcp.url, "MCP_TOKEN")
    yield from _contact("reward.judge.url", config.reward.judge.url, "JUDGE_TOKEN")
    yield from _contact("teacher.url", config.teacher.url, "TEACHER_TOKEN")
    if config.sampler.name == "vllm":
        for url in config.sampler.urls:
            yield from _contact("sampler.urls", url, "")
    coordinator = config.distributed.coordinator_address
    if coordinator not in ("", "auto") and not _LOOPBACK_HOST.fullmatch(coordinator):
        yield Deed("distributed.coordinator_address", f"join processes at {coordinator}")
    if "://" in config.run.mirror:
        yield Deed("run.mirror", f"fetch and copy the run from and to {config.run.mirror}")
    backends = config.log.backends
    if "wandb" in backends:
        yield Deed("log.backends", f"send metrics to Weights & Biases, project {config.log.project!r}")
    if "mlflow" in backends:
        yield Deed("log.backends", f"send metrics to MLflow, experiment {config.log.project!r}")
    if "prometheus" in backends and not _LOOPBACK_HOST.fullmatch(config.log.prometheus):
        yield Deed("log.prometheus", f"listen on {config.log.prometheus}")


def _contact(key: str, url: str, token_variable: str) -> Iterator[Deed]:
    """Yield the contact with an address beyond this machine, and with any address that would get a token."""
    if url in ("", NO_RETRIEVER_URL):
        return
    has_token = bool(os.environ.get(token_variable, "").strip())
    if has_token:
        yield Deed(key, f"contact {url} and send it the token {token_variable}")
    elif not _LOOPBACK.fullmatch(url):
        yield Deed(key, f"contact {url}")


def _downloads(config: Config, uses: Uses) -> Iterator[Deed]:
    """Yield the repositories that a config downloads; a model that is in the user's cache is none of them."""
    models = {
        "policy.path": config.policy.path,
        "policy.tokenizer": config.policy.tokenizer,
        "evaluate.policy": config.evaluate.policy,
        "sft.init_from": config.sft.init_from,
        "teacher.policy": config.teacher.policy,
    }
    is_child = bool(config.retriever.corpus) and not config.retriever.url
    if is_child:
        models["retriever.model"] = config.retriever.model
        models["retriever.reranker"] = config.retriever.reranker
    for key, name in models.items():
        if is_repository(name) and not is_cached_model(name):
            yield Deed(key, f"download the model {name}")
    data = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "sft.demonstrations": config.sft.demonstrations,
        "demonstrations.file": config.demonstrations.file,
    }
    for key, sources in data.items():
        if key in uses.writes:
            continue
        for name in _names(sources):
            if name.startswith(DATASETS) or is_repository(name):
                yield Deed(key, f"download the data {name}")


def _names(sources: Any) -> Iterator[str]:
    """Yield the names in a name, a list of names or a mapping to names."""
    if isinstance(sources, str):
        yield sources
        return
    for entry in sources.values() if isinstance(sources, Mapping) else sources:
        yield from _names(entry)


def _outputs(config: Config, uses: Uses, places: Sequence[Path]) -> Iterator[Deed]:
    """Yield the outputs of a config outside of all places."""
    for key in (*keys_with_mark(Mark.OUTPUT), *uses.writes):
        section, _, name = key.partition(".")
        path = getattr(getattr(config, section), name)
        # `_index` knows whether there is something to build.
        if path and key != "retriever.index" and not _is_inside(path, places):
            yield Deed(key, f"write {path}")
    mirror = config.run.mirror
    if mirror and "://" not in mirror and not _is_inside(mirror, places):
        yield Deed("run.mirror", f"copy the run to {mirror}")


def _index(config: Config, places: Sequence[Path]) -> Iterator[Deed]:
    """Yield the index that a config builds because it is missing, outside of all places."""
    retriever = config.retriever
    if retriever.url or not retriever.corpus:
        return
    path = Path(retriever.index or f"{retriever.corpus}.index")
    is_built = path.is_file() or (path / "manifest.json").is_file()
    if not is_built and not _is_inside(path, places):
        key = "retriever.index" if retriever.index else "retriever.corpus"
        yield Deed(key, f"build the index {path}")


def _links(config: Config) -> Iterator[Deed]:
    """Yield the links in the run's folder that lead out of it, where a command would write through them."""
    folder = Path(config.run.dir)
    links = []
    for place, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            path = Path(place, name)
            if path.is_symlink() and not _is_inside(path, [folder]):
                links.append(f"{path} to {path.resolve()}")
    for link in links[:NAMED_LINKS]:
        yield Deed("run.dir", f"write through the link {link}")
    if len(links) > NAMED_LINKS:
        yield Deed("run.dir", f"write through {len(links) - NAMED_LINKS} more links out of the folder")


def _is_inside(path: str | Path, places: Sequence[Path]) -> bool:
    """Return whether a path lies in one of the places, links followed."""
    resolved = Path(path).resolve()
    return any(resolved.is_relative_to(place.resolve()) for place in places)
