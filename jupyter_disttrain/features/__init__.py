"""Hold the opt-in features, each with the notebook's side and the ranks' side."""
