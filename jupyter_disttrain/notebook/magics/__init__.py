"""Define the magics."""
