"""The model of a run: tokenizer, architecture, mesh, parameters, and the base of its adapters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from jax.sharding import Mesh

from calibadv_jax.config import Config
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import content_hash, read_json, write_json
from calibadv_jax.core.tags import TAGS
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.adapters import Adapters, merge_params, split
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, placed_params
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.rollout.observation import decode, encode
from calibadv_jax.sampler.stopping import end_of_text_ids
from calibadv_jax.snapshots.checkpoint import newest_step, restore_params
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config
from calibadv_jax.snapshots.weight_files import weights_hash

BACKEND = transformers.TokenizersBackend  # reads tokenizer.json as it is
# A tokenizer must keep spaces, digits, accents, Chinese and newlines.
# Words are apart by white space, so that a tokenizer of whole words may put spaces around punctuation.
PROBES = ("who wrote it in the city", "1291 and 12345", "Zürich café", "北京 大学", "a\nb\n\nc")
BASE = "base.json"  # beside the config.json and the tokenizer of a run
MOVED = f"set its folder in the run's policy/{BASE}"


@dataclass(frozen=True)
class Model:
    """A policy without parameters, its tokenizer and its mesh."""

    policy: Policy
    hf_config: dict[str, Any]
    tokenizer: Any
    tokenizer_folder: Path
    mesh: Mesh
    pins: tuple[hub.Pin, ...] = ()  # of the repositories that policy and tokenizer come from

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 over every token and its id."""
        return content_hash(sorted(self.tokenizer.get_vocab().items()))


def build_model(config: Config, path: str, adapters: Adapters | None = None) -> Model:
    """Return the model of a HuggingFace folder, or of policy.init if `path` is empty.

    `path` is a folder, or a repository of the hub: OWNER/NAME or OWNER/NAME@REVISION. Raises UserError if
    neither is given or usable, or rollout.max_length exceeds the policy's positions.
    """
    source, pins = find_folder(config, path)
    if not path and not config.policy.init:
        raise UserError("policy.path is empty: set it to a HuggingFace folder, or give policy.init")
    hf_config = read_hf_config(source) if path else dict(config.policy.init)
    folder, more_pins = find_folder(config, config.policy.tokenizer or path, resolved=pins)
    tokenizer = load_tokenizer(folder)
    vocab_size = hf_config.setdefault("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        fault = f"the tokenizer has {len(tokenizer)} tokens, but the policy's vocab_size is {vocab_size}"
        raise UserError(f"{folder}: {fault}; use the tokenizer that belongs to the policy")
    # Kept by snapshots and exports.
    hf_config["eos_token_id"] = end_of_text_ids(source if path else "", hf_config, tokenizer)
    origin = f"{source}/config.json" if path else "policy.init"
    architecture, numerics = architecture_from_hf(hf_config, origin), Numerics.from_config(config.policy)
    positions, length = hf_config.get("max_position_embeddings"), config.rollout.max_length
    if positions is not None and length > int(positions):
        fault = f"the policy knows positions up to {positions} (max_position_embeddings)"
        raise UserError(f"{origin}: {fault}, but rollout.max_length is {length}; lower it")
    policy = Policy(architecture, numerics, adapters)
    return Model(policy, hf_config, tokenizer, folder, make_mesh(config.mesh), tuple({*pins, *more_pins}))


def find_folder(
    config: Config, name: str, with_weights: bool = False, resolved: Sequence[hub.Pin] = ()
) -> tuple[Path, tuple[hub.Pin, ...]]:
    """Return the folder of a policy or tokenizer, and the pin of its repository if it is on the hub.

    The commit is the one that the run's folder, or this process (`resolved`), has pinned. Raises UserError if
    the repository cannot be fetched, or policy.revision is set for a folder.
    """
    configured = config.policy.revision if name == config.policy.path else ""
    if not hub.is_repository(name):
        if name and configured:
            fault = f"policy.revision is {configured!r}, but policy.path={name} is a folder"
            raise UserError(f"{fault}: leave policy.revision empty, or name a repository OWNER/NAME")
        return Path(name), ()
    repository, _, revision = name.partition("@")
    if revision and configured:
        raise UserError(f"policy.path={name} and policy.revision both name a revision: leave one out")
    revision = revision or configured or "main"
    pins = {(pin.repository, pin.revision): pin for pin in (*hub.read_pins(Path(config.run.dir)), *resolved)}
    pin = pins.get((repository, revision)) or hub.resolve(repository, revision)
    return hub.fetch_model(pin, with_weights), (pin,)


def load_tokenizer(folder: str | Path) -> Any:
    """Return a HuggingFace tokenizer that can write and end the protocol's turns.

    Raises UserError if there is none, it has no end-of-text token, or text does not survive a round trip.
    """
    folder = Path(folder)
    if not has_tokenizer(folder):
        # transformers would make an empty tokenizer of a model's folder.
        advice = "set policy.tokenizer or policy.path to a folder with them"
        raise UserError(f"{folder}: no tokenizer files there; {advice}")
    # A tokenizer saved as TokenizersBackend is complete in tokenizer.json. Beside a config.json of model_type
    # qwen2 AutoTokenizer would take Qwen's own class, which splits text otherwise; and it may import torch.
    path = folder / "tokenizer_config.json"
    saved_as = read_json(path).get("tokenizer_class") if path.is_file() else None
    kind = BACKEND if saved_as == BACKEND.__name__ else transformers.AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing narrower for a file that it cannot read
        reason = f"no tokenizer can be loaded: {' '.join(str(error).split())}"
        if "trust_remote_code" in str(error):
            advice = "set policy.tokenizer to a folder with a tokenizer.json and no auto_map"
            reason = f"its tokenizer is a program of its own (auto_map), which is never run; {advice}"
        raise UserError(f"{folder}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: the tokenizer has no eos_token; add one to tokenizer_config.json")
    _check_round_trip(tokenizer, folder)
    return tokenizer


def _check_round_trip(tokenizer: Any, folder: Path) -> None:
    if changed := changed_probe(tokenizer):
        text, decoded = changed
        fault = f"the tokenizer, read as {type(tokenizer).__name__}, loses text: {text!r} becomes {decoded!r}"
        place = f"tokenizer_class to {BACKEND.__name__} in tokenizer_config.json there"
        raise UserError(f"{folder}: {fault}; set {place}, or policy.tokenizer to another folder")
    for tag in TAGS:
        if tag not in decode(tokenizer, encode(tokenizer, f"{tag} a")):
            fault = f"the tokenizer cannot write {tag}: encoding and decoding loses it"
            raise UserError(f"{folder}: {fault}; add the eight protocol tags as tokens")


def changed_probe(tokenizer: Any) -> tuple[str, str] | None:
    """Return the first of the `PROBES` that decode(encode(text)) changes, and the decoded text; None if none.

    Case, the length of white space and compatible forms of a letter are ignored, as in rewards. Words may
    become the unknown token, but must stay apart.
    """
    for text in PROBES:
        decoded = decode(tokenizer, encode(tokenizer, text))
        words, expected = _folded_words(decoded), _folded_words(text)
        has_unknown = tokenizer.unk_token is not None and tokenizer.unk_token in decoded
        if words != expected and not (has_unknown and len(words) >= len(expected)):
            return text, decoded
    return None


def _folded_words(text: str) -> list[str]:
    return unicodedata.normalize("NFKC", text).casefold().split()


def has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def initial_params(config: Config, model: Model, path: str) -> Params:
    """Return the parameters of a HuggingFace folder or repository, or random ones, with their adapters."""
    policy, mesh, init_from = model.policy, model.mesh, config.policy.lora.init_from
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


def base_of(config: Config, model: Model, path: str) -> AdapterBase | None:
    """Return the base of a run's adapters, given its folder or repository; None without adapters."""
    adapters, seed = Adapters.from_config(config.policy.lora), config.run.seed
    if adapters is None:
        return None
    if not path:
        return AdapterBase("", "", "", seed, adapters)
    folder, _ = find_folder(config, path, with_weights=True, resolved=model.pins)
    return AdapterBase(path, str(folder.absolute()), weights_hash(folder), seed, adapters)


@dataclass(frozen=True)
class AdapterBase:
    """The frozen model of a run's adapters: checkpoints name it, and do not hold it."""

    name: str  # policy.path; empty: random parameters
    folder: str  # where it lies, absolute; empty: random parameters
    sha256: str  # `weights_hash` of the folder; empty: random parameters
    seed: int  # of the random parameters
    adapters: Adapters

    def params(self, policy: Policy, mesh: Mesh) -> Params:
        """Return the sharded parameters without adapters; UserError if missing or of another model."""
        if not self.folder:
            return split(init_params(policy, mesh, self.seed))[0]
        folder = Path(self.folder)
        base = "the base of these adapters"
        if not folder.is_dir():
            raise UserError(f"{folder}: {base} ({self.name}) is not there; put it there, or {MOVED}")
        if weights_hash(folder) != self.sha256:
            fault = f"another model than {base} ({self.name}, sha256 {self.sha256[:12]})"
            raise UserError(f"{folder}: {fault}; put that one there, or {MOVED}")
        return load_params(folder, policy, mesh)

    def shared(self) -> dict[str, Any] | None:
        """Return the metadata for snapshots of the adapters alone; None for random parameters."""
        if not self.folder:
            return None
        precision = {"base_dtype": self.adapters.base_dtype, "scale": self.adapters.scale}
        return {"folder": self.folder, "sha256": self.sha256} | precision

    def write(self, folder: Path) -> None:
        """Write base.json beside config.json and tokenizer; the path of a base inside the run is relative."""
        place, run = self.folder, folder.absolute().parent
        if place and Path(place).is_relative_to(run):
            place = str(Path("..") / Path(place).relative_to(run))
        write_json(folder / BASE, asdict(self) | {"folder": place})


def read_base(folder: Path) -> AdapterBase | None:
    """Read base.json of a run's ``policy`` folder; None without adapters; UserError if damaged."""
    path = folder / BASE
    if not path.is_file():
        return None
    values: dict[str, Any] = read_json(path)
    try:
        place = values["folder"] and str((folder / values["folder"]).resolve())
        adapters = values["adapters"] | {"targets": tuple(values["adapters"]["targets"])}
        return AdapterBase(**values | {"folder": place, "adapters": Adapters(**adapters)})
    except (KeyError, TypeError) as error:
        advice = "train on for a step, which writes it again, or copy it from a backup"
        raise UserError(f"{path}: damaged ({error}); {advice}") from error


@dataclass(frozen=True)
class PolicySource:
    """A policy on disk: a HuggingFace folder, or a checkpoint or snapshot of a run."""

    path: Path
    kind: str  # "huggingface", "checkpoint", "snapshot"
    step: int | None = None  # of a checkpoint; None: the newest of the folder `path`

    def __str__(self) -> str:
        if self.kind == "checkpoint":
            which = "the newest checkpoint" if self.step is None else f"checkpoint {self.step}"
            return f"{which} in {self.path}"
        return f"{'snapshot' if self.kind == 'snapshot' else 'HuggingFace folder'} {self.path}"

    @property
    def model_folder(self) -> Path:
        """The folder of config.json and tokenizer: ``policy`` in a run."""
        parents = {"checkpoint": self.path.parent, "snapshot": self.path.parent.parent}
        return parents[self.kind] / "policy" if self.kind in parents else self.path

    @property
    def base(self) -> AdapterBase | None:
        """The base of a checkpoint's adapters; None where it holds every parameter."""
        return read_base(self.model_folder) if self.kind == "checkpoint" else None

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that a policy needs to take these parameters."""
        return self.base.adapters if self.base else None

    def at_step(self) -> PolicySource:
        """Return the newest checkpoint by its step, which stays the same while its run goes on."""
        if self.kind == "checkpoint" and self.step is None:
            return replace(self, step=newest_step(self.path))
        return self

    def params(self, policy: Policy, mesh: Mesh) -> Params:
        """Return all parameters in the policy's precision (a snapshot's: `compute_dtype`) and shardings.

        `policy` has the source's `adapters`. Raises UserError if they are missing, damaged, or of another
        policy.
        """
        if self.kind == "huggingface":
            return load_params(self.path, policy, mesh)
        if self.kind == "snapshot":
            from calibadv_jax.snapshots.publish import load_snapshot

            return load_snapshot(self.path, policy, mesh)
        targets = placed_params(policy.abstract_trained, mesh)
        trained = restore_params(self.path, targets, self.step)[0]
        base = self.base
        return merge_params(base.params(policy, mesh), trained) if base else trained


def find_policy(path: Path) -> PolicySource:
    """Return the policy at `path`: a HuggingFace folder, a run, its checkpoints, one of them, a snapshot."""
    path = path.absolute()
    if re.fullmatch(r"v\d+", path.name):
        return PolicySource(path, "snapshot")
    if path.name.isdigit() and path.parent.name == "checkpoints":
        return PolicySource(path.parent, "checkpoint", int(path.name))
    if path.name != "checkpoints" and not (path / "config.json").is_file():
        path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return PolicySource(path, "checkpoint" if path.name == "checkpoints" else "huggingface")
