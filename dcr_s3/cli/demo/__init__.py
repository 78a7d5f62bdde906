"""A live demonstration: a small model trains and publishes every step, two other processes follow."""
