"""Trainers of these tests share their programs where they ask for it."""

from trainer_rig import shared_programs  # noqa: F401
