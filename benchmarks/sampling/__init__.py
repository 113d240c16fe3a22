"""How fast trajectories are sampled."""
