"""Run ranks as a Slurm job.

Covers: the job's script (``batch_script``), the job (``job``, ``job_state``, ``queue``), the allocation around the
notebook (``allocation``), starting ranks (``launcher``), notices while it runs (``monitor``, ``texts``).
Does not cover: the user's options (``config.slurm``).
"""
