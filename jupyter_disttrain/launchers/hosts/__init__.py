"""Check hosts before ranks start there, and watch them afterwards."""
