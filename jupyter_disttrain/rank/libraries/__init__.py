"""Adapt libraries, and give advice on their errors."""
