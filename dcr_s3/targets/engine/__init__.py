"""Updating a running engine: stage beside it, pause it for the writes alone, prove what it holds."""
