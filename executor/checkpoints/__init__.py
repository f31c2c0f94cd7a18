"""Checkpoints: their place, their contents, and how all ranks write and read them together.

May import: `schemas`, `executor.stage`.
Start reading at `checkpoint.py`.
"""
