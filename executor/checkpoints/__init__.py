"""Checkpoints: where they lie, what is in them, how all ranks write and read them together."""
