"""The frozen model that a run's adapters belong to: its checkpoints name it, and do not hold it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json, write_json
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.adapters import Adapters, split
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.snapshots.huggingface import load_params, weights_hash

FILE = "base.json"  # beside the config.json and the tokenizer of a run
MOVED = f"write where it lies into the run's policy/{FILE} (folder)"


@dataclass(frozen=True)
class Base:
    """Which model it is, and the adapters that it has in the run."""

    name: str  # policy.path; empty: random parameters
    folder: str  # where it lies, absolute; empty: random parameters
    sha256: str  # `weights_hash` of the folder; empty: random parameters
    seed: int  # of the random parameters
    adapters: Adapters

    def params(self, policy: Policy, mesh: Mesh) -> Params:
        """Its parameters in the policy's precision and shardings, without adapters.

        Raises:
            UserError: it is not there, or another model lies there.
        """
        if not self.folder:
            return split(init_params(policy, mesh, self.seed))[0]
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

    def shared(self) -> dict[str, Any] | None:
        """What a snapshot of the adapters alone says of it; None for random parameters, which lie nowhere."""
        if not self.folder:
            return None
        about = {"folder": self.folder, "sha256": self.sha256}
        return about | {"base_dtype": self.adapters.base_dtype, "scale": self.adapters.scale}

    def said(self) -> dict[str, str]:
        """What a checkpoint says of it."""
        return {"name": self.name, "sha256": self.sha256}

    def write(self, folder: Path) -> None:
        """Into a run's folder with config.json and tokenizer; a base inside the run moves with it."""
        at, run = self.folder, folder.absolute().parent
        if at and Path(at).is_relative_to(run):
            at = str(Path("..") / Path(at).relative_to(run))
        write_json(folder / FILE, asdict(self) | {"folder": at, "adapters": self.adapters.as_dict()})


def read_base(folder: Path) -> Base | None:
    """Of a run's folder with config.json and tokenizer; None where the run trains every parameter.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    values: dict[str, Any] = read_json(path)
    try:
        at = values["folder"] and str((folder / values["folder"]).resolve())
        return Base(**values | {"folder": at, "adapters": Adapters.from_dict(values["adapters"])})
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path}: damaged ({error}); train on for a step, which writes it again, or copy it from a backup"
        ) from error
