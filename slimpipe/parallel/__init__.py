"""Device mesh, gradient buffers and the optimizer."""
