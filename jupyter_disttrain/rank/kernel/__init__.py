"""Run cells and serve the client's requests."""
