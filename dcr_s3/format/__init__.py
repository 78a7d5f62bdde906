"""The contract on the bucket. Pure: no network, no clock, no torch. `schemas/FORMAT.md` is the normative text."""
