"""Show what ranks and nodes do: figures, metrics, progress, stacks. This folder is the notebook's side."""
