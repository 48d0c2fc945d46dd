"""Compare jupyter_disttrain with torchrun and with other notebook tools: ``python -m benchmarks``."""
