"""Show a cluster: as a widget, as text, as a picture."""
