"""Completion and inspection of the ranks' variables, while a cell runs too."""
