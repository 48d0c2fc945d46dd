"""Scripts that run on the ranks, unchanged under torchrun and as a cell."""
