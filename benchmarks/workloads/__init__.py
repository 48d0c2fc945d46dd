"""What runs on the ranks: each file unchanged as a torchrun script and as a cell."""
