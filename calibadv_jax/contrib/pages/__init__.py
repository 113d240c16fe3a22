"""The trajectory page of a run: an index of all trajectories, transcripts on demand, and who serves them."""
