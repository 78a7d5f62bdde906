"""The relay's parts: copying one object to several stores, and whole snapshots."""
