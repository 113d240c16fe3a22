"""What belongs to a run: its folder, its model, its trainer, and how the parts are put together."""
