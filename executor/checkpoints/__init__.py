"""Checkpoints: where they are kept, what is in them, how all ranks write and read them together.

May import: `schemas`, `executor.stage`.
Start reading at `checkpoint.py`.
"""
