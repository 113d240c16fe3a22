"""``python -m calibadv_jax.train --config FILE [key.path=value …]``: as ``calibadv train``."""

import sys

from calibadv_jax.cli import calibadv

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    calibadv()
