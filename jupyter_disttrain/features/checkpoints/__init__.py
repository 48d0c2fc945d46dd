"""Save and load checkpoints (``%dist_save``, ``%dist_load``)."""
