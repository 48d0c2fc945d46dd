"""Reload edited modules on the ranks (``%dist_sync_code``)."""
