"""Run scripts on the ranks (``%dist_run``)."""
