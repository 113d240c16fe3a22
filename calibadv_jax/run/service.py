"""Whether a run that is continued still searches in the index that it began with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config
from calibadv_jax.config.keys import among
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.run.folder import SERVICE, holds_training
from calibadv_jax.services.retriever_replies import difference, identity

FILE = "retriever.json"  # in the run's folder: what the retrieval service said of its index


def check_service(config: Config, folder: Path, state: Mapping[str, Any]) -> None:
    """Compares the service with the service of the last start, and notes it in the folder.

    Args:
        folder: of the run.
        state: what the service's health said.

    Raises:
        UserError: the folder holds steps that were trained with another index, and checkpoint.allow_change
            names neither retriever.content nor its section; or it cannot be written.
    """
    path = folder / FILE
    if holds_training(folder) and not among(config.checkpoint.allow_change, SERVICE):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # an earlier version wrote none
            before = identity(state)
        except ValueError as error:
            raise UserError(
                f"{path}: damaged, so that the index of the last start is not known; remove it to accept"
                " the service that is there now"
            ) from error
        if other := difference(before, state):
            raise UserError(
                f"run.dir={folder}: the retrieval service has another index than at the last start ({other});"
                " serve that index, choose another run.dir, or accept it:"
                f" checkpoint.allow_change=[{SERVICE}]"
            )
    try:
        write_json(path, identity(state))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
