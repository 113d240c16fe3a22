"""The cold start of one seed, for evidence.py: world, supervised training, evaluation.

python -m benchmarks.evidence_cold --config configs/quickstart.yaml run.dir=FOLDER run.seed=3 world.seed=3
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from calibadv_jax import cli, evaluate, sft
from calibadv_jax.config import Config
from calibadv_jax.data.world import write_world
from calibadv_jax.errors import UserError
from calibadv_jax.run_folder import COLD_START, COLD_START_KEYS, differences

PLACES = ("world.dir", "sft.output")


def run(config: Config) -> None:
    """What is there already is not made again. The evaluation builds the index too.

    Raises:
        UserError: the folder holds a cold start with other settings.
    """
    write_world(config.world)
    if (Path(config.sft.output) / "config.json").is_file():
        check(config)
    else:
        sft.run(config)
    evaluate.run(config)


def check(config: Config) -> None:
    """As `run_folder.check_cold_start`, but the folder may be named in another way, or have been moved."""
    path = Path(config.run.dir) / COLD_START
    if not path.is_file():
        return
    before = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = [name for name, _, _ in differences(before, dataclasses.asdict(config))]
    changed = [name for name in names if name.startswith(COLD_START_KEYS) and name not in PLACES]
    if changed:
        raise UserError(
            f"{config.run.dir}: its cold start has other settings ({', '.join(changed)}); remove it"
        )


if __name__ == "__main__":
    cli.main("sft", run)
