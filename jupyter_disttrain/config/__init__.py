"""Validate what a user may ask for."""
