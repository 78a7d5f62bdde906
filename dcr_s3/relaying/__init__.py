"""The relay's parts: copying one object to several stores, what lets receivers skip versions, and skipping them."""
