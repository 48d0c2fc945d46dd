"""Validate what a user may request."""
