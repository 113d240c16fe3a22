"""The architecture that a config plans with, where the model itself may not be on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from calibadv_jax.config import Config
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.snapshots.huggingface import read_hf_config


@dataclass(frozen=True)
class PlannedArchitecture:
    """An architecture, and where its shape comes from."""

    architecture: Architecture
    source: str  # in words


def known_shapes() -> dict[str, dict[str, Any]]:
    """Return the fields of config.json of published models, by their repository."""
    entries = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
    shapes = {}
    for entry in entries:
        for variant in entry["variants"]:
            shapes[entry["names"].format(variant)] = entry["shape"]
    return shapes


def find_architecture(config: Config) -> PlannedArchitecture | None:
    """Return the architecture of the policy that a run starts from, without a network.

    It is that of the folder policy.path, of the hub's cache, or of `known_shapes`. policy.init counts where
    policy.path is empty, or a folder below the run's that a cold start will make. A cold start that writes
    policy.path keeps the shape of sft.init_from.

    Returns:
        The architecture; None if it is not known yet: the vocabulary's size is that of a tokenizer that may
        not exist, or a cold start will make the policy from a model that is not on this machine.

    Raises:
        UserError: The policy is of a kind that is not supported, or nothing says what its shape is.
    """
    named = _hf_config(config, config.policy.path)
    if named is None:
        return None
    hf_config, source = named
    if "vocab_size" not in hf_config:
        return None
    return PlannedArchitecture(architecture_from_hf(hf_config, source), source)


def find_teacher_architecture(config: Config) -> Architecture:
    """Return the architecture of a teacher that has weights of its own, without a network.

    Raises:
        UserError: The teacher is of a kind that is not supported, or nothing says what its shape is.
    """
    path = config.teacher.policy
    named = find_hf_config(path)
    if named is None:
        raise UserError(
            f"teacher.policy is {path}, where no config.json is, and whose shape is not known, so that the"
            " memory that it needs cannot be counted: name the folder of a model that is there"
        )
    return architecture_from_hf(*named)


def find_hf_config(path: str, revision: str = "") -> tuple[dict[str, Any], str] | None:
    """Return the fields of a model's config.json, and where they come from, without a network.

    Args:
        path: A folder, or a repository of the hub, which may end in @revision.
        revision: Of the repository, where `path` names none; empty: main.

    Returns:
        Those of the folder, of the hub's cache, or of `known_shapes`; None where the model is not known.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return read_hf_config(folder), f"{folder}/config.json"
    if not hub.is_repository(path):
        return None
    repository, _, named_revision = path.partition("@")
    cached = try_to_load_from_cache(repository, "config.json", revision=named_revision or revision or "main")
    if isinstance(cached, str):
        return read_hf_config(Path(cached).parent), f"{repository} in the hub's cache"
    shape = known_shapes().get(repository)
    if shape is None:
        return None
    return dict(shape), f"{repository} in this project's table of models"


def _hf_config(config: Config, path: str) -> tuple[dict[str, Any], str] | None:
    """Return the fields of config.json, and where they come from; None where a cold start will make them."""
    if not path:
        return dict(config.policy.init), "policy.init"
    named = find_hf_config(path, config.policy.revision)
    if named is not None:
        return named
    is_made_by_the_run = Path(path).absolute().is_relative_to(Path(config.run.dir).absolute())
    if is_made_by_the_run and config.policy.init:
        return dict(config.policy.init), f"policy.init, since {path} is not there yet"
    if path == config.sft.output and config.sft.init_from:
        return find_hf_config(config.sft.init_from)
    raise UserError(
        f"policy.path is {path}, where no config.json is, and whose shape is not known: name a folder that"
        " has one, or leave policy.path empty and give the shape in policy.init (its config.json, vocab_size"
        " too)"
    )
