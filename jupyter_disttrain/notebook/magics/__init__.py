"""Define the magics.

Covers: one class per subject: ``cell_magics`` (cells and their values), ``cluster_magics`` (ranks), ``script_magics``,
``file_magics`` (checkpoints, data and code); their options and how these are parsed (``arguments``).
"""
