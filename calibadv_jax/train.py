"""Run ``calibadv train``: ``python -m calibadv_jax.train --config FILE [key.path=value …]``."""

import sys

from calibadv_jax.cli import calibadv

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    calibadv()
