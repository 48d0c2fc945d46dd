"""Run ranks as a Slurm job.

Covers: the job's script (``batch_script``), the job (``job``, ``state``, ``queue``), the allocation around the notebook
(``allocation``), notices while it runs (``monitor``, ``texts``).
Does not cover: the user's options (``config.slurm``), starting ranks (``launchers.slurm``).
"""
