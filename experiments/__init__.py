"""GRPO beside CalibAdv, in worlds where the truth is known."""
