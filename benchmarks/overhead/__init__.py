"""Measure the cost of this package: many idle ranks (``control_plane``), telemetry and its views (``telemetry``)."""
