"""Ranks as a Slurm job.

Covers: the job's script (``batch_script``), the job (``job``, ``state``, ``queue``),
the allocation around the notebook (``allocation``), remarks while it runs (``watch``, ``words``).
Does not cover: what a person may ask for (``slurm_options``), starting ranks (``launchers.slurm``).
"""
