"""Run ``calibadv COMMAND …`` as ``python -m calibadv_jax COMMAND …``, if the script is not on the path."""

from calibadv_jax.cli import calibadv

if __name__ == "__main__":
    calibadv()
