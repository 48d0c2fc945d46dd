"""Limit what an interrupt of a cell can damage."""
