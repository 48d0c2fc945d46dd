"""Measure clusters over several hosts: ``python -m benchmarks.hosts``, ``python -m benchmarks.hosts.staging``.

The hosts are those of tests/lab: namespaces of this machine, which share its cores and its disk.
"""
