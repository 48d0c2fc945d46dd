"""Shared parts of the benchmarks: kernels and sessions, processes, statistics, tables, command lines."""
