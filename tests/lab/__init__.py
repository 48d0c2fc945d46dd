"""A test lab: network hosts with a real sshd each, and a real Slurm over them, on this machine.

Covers: hosts made of namespaces (``lab``, ``host``), their network, which can be cut, closed and captured
(``network``), Slurm (``slurm``), several labs side by side (``places``), pytest fixtures (``fixtures``).
Does not cover: GPUs; hosts without a shared file system, except for shared memory, temporary files and one local disk.

``python -m tests.lab`` starts one for manual use.
"""

from .lab import Lab

__all__ = ["Lab"]
