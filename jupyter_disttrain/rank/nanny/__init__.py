"""Run the parent process of a rank."""
