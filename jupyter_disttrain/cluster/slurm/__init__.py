"""Run ranks as a Slurm job.

Covers: the job's script (``batch_script``), the job (``job``, ``state``, ``queue``), the allocation around the notebook
(``allocation``), notices while it runs (``watch``, ``words``).
Does not cover: the user's options (``slurm_options``), starting ranks (``launchers.slurm``).
"""
