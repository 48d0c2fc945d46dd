"""Measure ResNet-50 by number of ranks, with DDP and with Horovod: ``python -m benchmarks.scaling``."""
