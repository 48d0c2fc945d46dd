"""Measure jupyter_disttrain beside its yardsticks and its peers: ``python -m benchmarks``.

Covers: every row of the Speed table, each through a real kernel and in one run with its yardstick.
Does not cover: pass or fail. A figure is printed, never asserted; tests hold the behaviour.
"""
