"""Measure the widget and the side panel in Chromium."""
