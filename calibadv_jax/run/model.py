"""The model of a run: tokenizer, architecture, mesh, parameters, and the base of its adapters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from jax.sharding import Mesh

from calibadv_jax.config import Config
from calibadv_jax.core import hub
from calibadv_jax.core.errors import Faults, UserError
from calibadv_jax.core.files import content_hash, read_json, write_json
from calibadv_jax.core.tags import TAGS
from calibadv_jax.core.tokens import decode, encode
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.adapters import Adapters, merge_params, split
from calibadv_jax.policy.architecture import Architecture, YarnScaling, architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, placed_params
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.sampler.stop_rule import end_of_text_ids
from calibadv_jax.snapshots.checkpoint import newest_step, restore_params
from calibadv_jax.snapshots.huggingface import check_weights, load_params, read_hf_config
from calibadv_jax.snapshots.weight_files import weights_hash

BACKEND = transformers.TokenizersBackend  # The class that reads tokenizer.json without changing it.
# Texts that a tokenizer must keep: spaces, digits, accents, Chinese and newlines. White space separates the
# words, because a tokenizer of whole words may put spaces around punctuation.
PROBES = ("who wrote it in the city", "1291 and 12345", "Zürich café", "北京 大学", "a\nb\n\nc")
BASE = "base.json"  # File beside the config.json and the tokenizer of a run with adapters.
MOVED = f"set its folder in the run's policy/{BASE}"


@dataclass(frozen=True)
class Model:
    """A policy without parameters, its tokenizer and its mesh."""

    policy: Policy
    hf_config: dict[str, Any]
    tokenizer: Any
    tokenizer_folder: Path
    mesh: Mesh
    pins: tuple[hub.Pin, ...] = ()  # commits of the repositories that policy and tokenizer come from

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 over every token and its id."""
        return content_hash(sorted(self.tokenizer.get_vocab().items()))


def build_model(config: Config, path: str, adapters: Adapters | None = None) -> Model:
    """Return the model of a HuggingFace folder or of policy.init, without parameters.

    Args:
        config: The run's config.
        path: A folder, or a repository of the hub: OWNER/NAME or OWNER/NAME@REVISION. Empty: policy.init.
        adapters: The LoRA adapters of the policy; None: every parameter is trained.

    Returns:
        The model on the mesh of the config.

    Raises:
        UserError: Neither `path` nor policy.init is given or usable, the tokenizer does not fit the policy,
            or rollout.max_length exceeds the policy's positions. A wrong policy and a wrong policy.tokenizer
            are named together.
    """
    faults = Faults()
    pins: tuple[hub.Pin, ...] = ()
    with faults.collected():
        if not path and not config.policy.init:
            raise UserError("policy.path is empty: set it to a HuggingFace folder, or give policy.init")
        source, pins = find_folder(config, path)
        hf_config = read_hf_config(source) if path else dict(config.policy.init)
        origin = f"{source}/config.json" if path else "policy.init"
    if not config.policy.tokenizer:
        faults.raise_all()  # the tokenizer is in the policy's folder
    with faults.collected():
        tokenizer_folder, tokenizer_pins = find_folder(config, config.policy.tokenizer or path, resolved=pins)
        tokenizer = load_tokenizer(tokenizer_folder)
    faults.raise_all()
    last_token, last_id = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    vocab_size = hf_config.setdefault("vocab_size", last_id + 1)
    if last_id >= vocab_size:
        raise UserError(
            f"{tokenizer_folder}: the tokenizer has the id {last_id} ({last_token!r}), but the policy's"
            f" vocab_size is {vocab_size}, so that this id has no embedding; use the tokenizer that belongs"
            " to the policy"
        )
    # Snapshots and exports keep the ids in their config.json.
    hf_config["eos_token_id"] = end_of_text_ids(source if path else "", hf_config, tokenizer)
    architecture = architecture_from_hf(hf_config, origin)
    numerics = Numerics.from_config(config.policy)
    _check_positions(hf_config, architecture, config.rollout.max_length, origin)
    policy = Policy(architecture, numerics, adapters)
    mesh = make_mesh(config.mesh)
    all_pins = tuple({*pins, *tokenizer_pins})
    return Model(policy, hf_config, tokenizer, tokenizer_folder, mesh, all_pins)


def _check_positions(
    hf_config: Mapping[str, Any], architecture: Architecture, length: int, origin: str
) -> None:
    """Refuse (UserError) trajectories that are longer than the policy's positions."""
    positions = hf_config.get("max_position_embeddings")
    scaling = architecture.rope_scaling
    if positions is not None and isinstance(scaling, YarnScaling):
        # Qwen's config.json has the native length in max_position_embeddings where YaRN is added by hand.
        positions = max(int(positions), int(scaling.factor * scaling.original_length))
    if positions is not None and length > int(positions):
        raise UserError(
            f"{origin}: the policy knows positions up to {positions} (max_position_embeddings), but"
            f" rollout.max_length is {length}; lower it, or stretch the positions with YaRN, if the model's"
            " authors say so (docs/models.md)"
        )


def find_folder(
    config: Config, name: str, with_weights: bool = False, resolved: Sequence[hub.Pin] = ()
) -> tuple[Path, tuple[hub.Pin, ...]]:
    """Return the folder of a policy or tokenizer; a repository of the hub is fetched.

    Args:
        config: The run's config. If the run's folder has pinned a commit of the repository, that one is used.
        name: A folder or a repository.
        with_weights: Whether the weights are fetched, too.
        resolved: Commits that this process has chosen already, which the run's folder may not name yet.

    Returns:
        The folder, and the pinned commit if `name` is a repository.

    Raises:
        UserError: The repository cannot be fetched, its revision is named twice, or policy.revision is set
            for a folder.
    """
    configured = config.policy.revision if name == config.policy.path else ""
    if not hub.is_repository(name):
        if name and configured:
            raise UserError(
                f"policy.revision is {configured!r}, but policy.path={name} is a folder: leave"
                " policy.revision empty, or name a repository OWNER/NAME"
            )
        return Path(name), ()
    repository, _, named = name.partition("@")
    if named and configured:
        raise UserError(f"policy.path={name} and policy.revision both name a revision: leave one out")
    revision = named or configured or "main"
    pins = {}
    for pin in (*hub.read_pins(Path(config.run.dir)), *resolved):
        pins[pin.repository, pin.revision] = pin
    pinned = pins.get((repository, revision)) or hub.resolve(repository, revision)
    return hub.fetch_model(pinned, with_weights), (pinned,)


def load_tokenizer(folder: str | Path) -> Any:
    """Return a HuggingFace tokenizer that can write and end the protocol's turns.

    Args:
        folder: Folder of the tokenizer's files.

    Raises:
        UserError: There is no tokenizer, it has no end-of-text token, or encoding and decoding loses text.
    """
    folder = Path(folder)
    if not has_tokenizer(folder):
        # transformers would make an empty tokenizer of a model's folder.
        raise UserError(
            f"{folder}: no tokenizer files there; set policy.tokenizer or policy.path to a folder with them"
        )
    tokenizer_class = _tokenizer_class(folder)
    try:
        tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing narrower for a file that it cannot read
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{folder}: its tokenizer is a program of its own (auto_map), which is never run; set"
                " policy.tokenizer to a folder with a tokenizer.json and no auto_map"
            ) from error
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: no tokenizer can be loaded: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: the tokenizer has no eos_token; add one to tokenizer_config.json")
    _check_round_trip(tokenizer, folder)
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """Return the class of transformers that reads a folder's tokenizer.

    A tokenizer saved as TokenizersBackend is complete in tokenizer.json. Beside a config.json of model_type
    qwen2, AutoTokenizer would choose Qwen's own class, which splits text differently and may import torch.
    """
    path = folder / "tokenizer_config.json"
    if path.is_file() and read_json(path).get("tokenizer_class") == BACKEND.__name__:
        return BACKEND
    return transformers.AutoTokenizer


def _check_round_trip(tokenizer: Any, folder: Path) -> None:
    """Refuse (UserError) a tokenizer that loses text or a tag of the protocol."""
    changed = changed_probe(tokenizer)
    if changed:
        text, decoded = changed
        raise UserError(
            f"{folder}: the tokenizer, read as {type(tokenizer).__name__}, loses text: {text!r} becomes"
            f" {decoded!r}; set tokenizer_class to {BACKEND.__name__} in tokenizer_config.json there, or"
            " policy.tokenizer to another folder"
        )
    for tag in TAGS:
        if tag not in decode(tokenizer, encode(tokenizer, f"{tag} a")):
            raise UserError(
                f"{folder}: the tokenizer cannot write {tag}: encoding and decoding loses it; add the eight"
                " protocol tags as tokens"
            )


def changed_probe(tokenizer: Any) -> tuple[str, str] | None:
    """Return the first text of `PROBES` that encoding and decoding changes.

    Case, the length of white space and compatible forms of a letter are ignored, as in rewards. Words may
    become the unknown token, but must stay separate.

    Args:
        tokenizer: A HuggingFace tokenizer.

    Returns:
        The text and the decoded text; None if no text changes.
    """
    for text in PROBES:
        decoded = decode(tokenizer, encode(tokenizer, text))
        words = _folded_words(decoded)
        expected = _folded_words(text)
        if words == expected:
            continue
        has_unknown = tokenizer.unk_token is not None and tokenizer.unk_token in decoded
        if not has_unknown or len(words) < len(expected):
            return text, decoded
    return None


def _folded_words(text: str) -> list[str]:
    return unicodedata.normalize("NFKC", text).casefold().split()


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def initial_params(config: Config, model: Model, path: str) -> Params:
    """Return the parameters that training begins with, including those of the adapters.

    Args:
        config: The run's config.
        model: The run's model.
        path: A HuggingFace folder or repository; empty: random parameters from run.seed.

    Returns:
        The parameters in the policy's precision and shardings.

    Raises:
        UserError: The weights or the adapters of policy.lora.init_from cannot be loaded, or do not fit.
    """
    policy = model.policy
    mesh = model.mesh
    init_from = config.policy.lora.init_from
    if not path:
        params = init_params(policy, mesh, config.run.seed)
    else:
        folder, _ = find_folder(config, path, with_weights=True, resolved=model.pins)
        params = load_params(folder, policy, mesh)
        if policy.adapters and not init_from:
            params = merge_params(params, init_params(policy, mesh, config.run.seed, only_trained=True))
    if policy.adapters and init_from:
        from calibadv_jax.snapshots.peft import load_adapters

        params = merge_params(params, load_adapters(Path(init_from), policy, mesh))
    return params


def check_start(config: Config, model: Model) -> None:
    """Compare the weights and adapters that a run begins with, by their headers, with the policy.

    Args:
        config: The run's config.
        model: The run's model.

    Raises:
        UserError: The weights or the adapters are missing, damaged or of another policy.
    """
    if config.policy.path:
        folder, _ = find_folder(config, config.policy.path, with_weights=True, resolved=model.pins)
        check_weights(folder, model.policy)
    if config.policy.lora.init_from:
        from calibadv_jax.snapshots.peft import adapters_hash

        adapters_hash(Path(config.policy.lora.init_from))


def adapter_base(config: Config, model: Model, path: str) -> AdapterBase | None:
    """Return the frozen base of a run's adapters.

    Args:
        config: The run's config.
        model: The run's model.
        path: The base's folder or repository; empty: random parameters from run.seed.

    Returns:
        The base; None if the run has no adapters.

    Raises:
        UserError: The base cannot be fetched or read.
    """
    adapters = Adapters.from_config(config.policy.lora)
    if adapters is None:
        return None
    seed = config.run.seed
    if not path:
        return AdapterBase("", "", "", seed, adapters)
    folder, _ = find_folder(config, path, with_weights=True, resolved=model.pins)
    return AdapterBase(path, str(folder.absolute()), weights_hash(folder), seed, adapters)


@dataclass(frozen=True)
class AdapterBase:
    """The frozen model of a run's adapters: checkpoints name it, and do not hold it."""

    name: str  # policy.path; empty: random parameters
    folder: str  # its absolute path; empty: random parameters
    sha256: str  # `weights_hash` of the folder; empty: random parameters
    seed: int  # seed of the random parameters
    adapters: Adapters

    def params(self, policy: Policy, mesh: Mesh) -> Params:
        """Return the base's parameters, without adapters.

        Args:
            policy: The policy whose precision and shardings the parameters get.
            mesh: The devices.

        Raises:
            UserError: The folder is missing or holds another model.
        """
        if not self.folder:
            base, _ = split(init_params(policy, mesh, self.seed))
            return base
        folder = Path(self.folder)
        if not folder.is_dir():
            raise UserError(
                f"{folder}: the base of these adapters ({self.name}) is not there; put it there, or {MOVED}"
            )
        if weights_hash(folder) != self.sha256:
            raise UserError(
                f"{folder}: another model than the base of these adapters ({self.name}, sha256"
                f" {self.sha256[:12]}); put that one there, or {MOVED}"
            )
        return load_params(folder, policy, mesh)

    def snapshot_metadata(self) -> dict[str, Any] | None:
        """Return the metadata for snapshots that hold the adapters alone; None for random parameters."""
        if not self.folder:
            return None
        return {
            "folder": self.folder,
            "sha256": self.sha256,
            "base_dtype": self.adapters.base_dtype,
            "scale": self.adapters.scale,
        }

    def write(self, folder: Path) -> None:
        """Write base.json.

        Args:
            folder: The folder of config.json and the tokenizer: ``policy`` in the run's folder. The path of a
                base inside the run's folder is written relative to it, so that the run can be moved.
        """
        base_folder = self.folder
        run_folder = folder.absolute().parent
        if base_folder and Path(base_folder).is_relative_to(run_folder):
            base_folder = str(Path("..") / Path(base_folder).relative_to(run_folder))
        write_json(folder / BASE, asdict(self) | {"folder": base_folder})


def read_base(folder: Path) -> AdapterBase | None:
    """Read base.json.

    Args:
        folder: The ``policy`` folder of a run.

    Returns:
        The base of the run's adapters; None if it has none.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / BASE
    if not path.is_file():
        return None
    values: dict[str, Any] = read_json(path)
    try:
        base_folder = values["folder"]
        if base_folder:
            base_folder = str((folder / base_folder).resolve())
        fields = values["adapters"]
        adapters = Adapters(**fields | {"targets": tuple(fields["targets"])})
        return AdapterBase(**values | {"folder": base_folder, "adapters": adapters})
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path}: damaged ({error}); train on for a step, which writes it again, or copy it from a backup"
        ) from error


@dataclass(frozen=True)
class PolicySource:
    """A policy on disk: a HuggingFace folder, or a checkpoint or snapshot of a run."""

    path: Path
    kind: str  # "huggingface", "checkpoint", "snapshot"
    step: int | None = None  # step of a checkpoint; None: the newest of the folder `path`

    def __str__(self) -> str:
        if self.kind == "checkpoint":
            checkpoint = "the newest checkpoint" if self.step is None else f"checkpoint {self.step}"
            return f"{checkpoint} in {self.path}"
        if self.kind == "snapshot":
            return f"snapshot {self.path}"
        return f"HuggingFace folder {self.path}"

    @property
    def model_folder(self) -> Path:
        """The folder of config.json and tokenizer: ``policy`` in a run."""
        if self.kind == "checkpoint":
            return self.path.parent / "policy"
        if self.kind == "snapshot":
            return self.path.parent.parent / "policy"
        return self.path

    @property
    def base(self) -> AdapterBase | None:
        """The base of a checkpoint's adapters; None if it holds every parameter."""
        if self.kind != "checkpoint":
            return None
        return read_base(self.model_folder)

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that a policy must have to take these parameters."""
        base = self.base
        return base.adapters if base else None

    def at_step(self) -> PolicySource:
        """Return the newest checkpoint by its step, which stays the same while its run goes on."""
        if self.kind == "checkpoint" and self.step is None:
            return replace(self, step=newest_step(self.path))
        return self

    def params(self, policy: Policy, mesh: Mesh) -> Params:
        """Return all parameters.

        Args:
            policy: A policy with the source's `adapters`.
            mesh: The devices.

        Returns:
            The parameters in the policy's shardings and precision (of a snapshot: `compute_dtype`).

        Raises:
            UserError: They are missing, damaged, or of another policy.
        """
        if self.kind == "huggingface":
            return load_params(self.path, policy, mesh)
        if self.kind == "snapshot":
            from calibadv_jax.snapshots.publish import load_snapshot

            return load_snapshot(self.path, policy, mesh)
        targets = placed_params(policy.abstract_trained, mesh)
        trained, _ = restore_params(self.path, targets, self.step)
        base = self.base
        if base is None:
            return trained
        return merge_params(base.params(policy, mesh), trained)


def find_policy(path: Path) -> PolicySource:
    """Return the policy at a path, by the names of the folders.

    Args:
        path: A HuggingFace folder, a run's folder, its folder of checkpoints, one of them, or a snapshot.
    """
    path = path.absolute()
    if re.fullmatch(r"v\d+", path.name):
        return PolicySource(path, "snapshot")
    if path.name.isdigit() and path.parent.name == "checkpoints":
        return PolicySource(path.parent, "checkpoint", int(path.name))
    if path.name == "checkpoints":
        return PolicySource(path, "checkpoint")
    is_run = not (path / "config.json").is_file() and (path / "checkpoints").is_dir()
    if is_run:
        return PolicySource(path / "checkpoints", "checkpoint")
    return PolicySource(path, "huggingface")
