"""Ranks as a Slurm job.

Covers: what is asked for (``options``), the job's script (``batch_script``), the job (``job``, ``state``, ``queue``),
the allocation around the notebook (``allocation``), remarks while it runs (``watch``, ``words``).
Does not cover: how ipyparallel is told to start ranks so (``launchers.slurm``).
"""
