"""A whole step of training: rollouts and update."""
