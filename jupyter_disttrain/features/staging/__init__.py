"""Copy data sets to the nodes (``%dist_stage``)."""
