"""Export cells as a script (``%dist_export``)."""
