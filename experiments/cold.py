"""The cold start of one seed, for `runs`: world, supervised training, evaluation.

python -m experiments.cold --config configs/evidence.yaml run.dir=FOLDER run.seed=3 world.seed=3
"""

from __future__ import annotations

from pathlib import Path

from calibadv_jax import cli
from calibadv_jax.commands import evaluate, sft
from calibadv_jax.config import Config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.run.folder import check_cold_start

PLACES = ("world.dir", "sft.output")  # the folder may be named in another way, or have been moved


def run(config: Config) -> None:
    """Make the parts that do not exist yet. The evaluation builds the index too.

    Raises:
        UserError: the folder holds a cold start with other settings.
    """
    write_world(config.world, config.rollout.protocol)
    if (Path(config.sft.output) / "config.json").is_file():
        check_cold_start(config, PLACES)
    else:
        sft.run(config)
    evaluate.run(config)


if __name__ == "__main__":
    cli.main("sft", run)
