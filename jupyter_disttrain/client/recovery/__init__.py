"""Recover a session: detect hangs and deaths, release and replace ranks, explain what happened."""
