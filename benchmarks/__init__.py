"""Measure jupyter_disttrain: speed beside other tools, recovery from faults, scaling, several hosts, overhead.

Covers: one folder per group. ``python -m benchmarks`` runs ``compare``; ``faults``, ``hosts``, ``scaling`` and the
modules in ``overhead`` run as e.g. ``python -m benchmarks.faults``.
Does not cover: pass or fail of a time. Times are printed, never asserted; the tests cover behaviour.
"""
