"""The relay's parts: copying one object to several stores, and what lets receivers skip versions."""
