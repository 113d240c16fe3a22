"""Configs with other keys than the defaults."""

from dataclasses import replace

from calibadv_jax.config import Config


def changed(config=None, **sections):
    """The config, by default the plain one, with other keys in its sections: ``changed(run={"seed": 1})``."""
    config = config or Config()
    values = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return replace(config, **values)
