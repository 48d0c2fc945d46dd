"""Define the magics.

Covers: one class per subject: ``cell_magics`` (cells and their values), ``cluster_magics`` (ranks), ``file_magics``
(scripts, data, code and checkpoints); their options and how these are parsed (``arguments``).
"""
