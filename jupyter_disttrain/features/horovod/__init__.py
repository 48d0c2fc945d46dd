"""Build Horovod and run it on the ranks."""
