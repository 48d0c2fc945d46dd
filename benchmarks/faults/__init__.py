"""Inject faults into sessions at random and check that they recover: ``python -m benchmarks.faults``."""
