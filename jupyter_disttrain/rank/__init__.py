"""What runs on every rank: its process, its process group, its output.

Imports the standard library's rooms, ipyparallel's engine, torch and mpi4py; never ``client``, ``notebook`` or
``server``.
"""
