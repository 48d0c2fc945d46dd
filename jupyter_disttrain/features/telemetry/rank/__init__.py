"""Measure what a rank and its node do, in the rank's process and its nanny."""
