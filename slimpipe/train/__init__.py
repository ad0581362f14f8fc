"""The training loop and what surrounds it: session, checkpoints, metrics, display, generation."""
