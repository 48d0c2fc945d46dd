"""Show what ranks and nodes do: usage, metrics, progress, stacks. This folder is the notebook's side."""
