"""Define what is exchanged between the notebook's process, nannies and ranks."""
