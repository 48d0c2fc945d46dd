"""Run in the process of every rank, and in its nanny.

Imports ``protocol``, ``config``, the ranks' side of ``features``, ipyparallel's engine, torch and mpi4py; never
``client``, ``notebook`` or ``server``.
"""
