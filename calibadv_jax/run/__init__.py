"""A run: its folder, model, trainer and state, and the parts made from its config."""
