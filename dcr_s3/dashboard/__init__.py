"""Pictures of a run: one self-contained page, and a heat map of what changed."""
