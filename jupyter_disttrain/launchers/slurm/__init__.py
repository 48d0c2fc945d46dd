"""Run ranks as a Slurm job.

Covers: the job's script (``batch_script``), the job (``job``, ``job_state``), its nodes or those of the allocation
around the notebook (``allocated_nodes``), starting ranks (``launcher``), notices (``monitor``, ``user_messages``).
Does not cover: the user's options (``config.slurm``).
"""
