"""How services that show metrics name a run, and what they show of its config."""

from __future__ import annotations

from pathlib import Path

from calibadv_jax.config import Config
from calibadv_jax.config.load import kept_values
from calibadv_jax.metrics.trackers import RunDescription
from calibadv_jax.rollout_store.schema import run_name

COLD_START_KIND = "cold start"


def describe_run(config: Config, folder: Path, kind: str) -> RunDescription:
    """Return name, group and parameters of a run.

    Args:
        config: the config of the start. Secrets are left out, as in the config that a run keeps.
        folder: folder of the run. Its last two folders are the name, and the last but one is the group.
        kind: "train", or COLD_START_KIND, which is a part of the name.
    """
    name = run_name(folder)
    if kind == COLD_START_KIND:
        name = f"{name} {kind}"
    return RunDescription(name, group=folder.resolve().parent.name, kind=kind, parameters=kept_values(config))
