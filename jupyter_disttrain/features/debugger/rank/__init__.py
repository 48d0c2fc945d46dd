"""The rank's side of the debugger."""
