"""Start and end a rank's process."""
