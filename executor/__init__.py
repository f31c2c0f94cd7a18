"""Runs lowered programs on torch.distributed, and measures them.

May import: `schemas`, `facts`.
Start reading at `run/rank.py`, then `program/interpreter.py`.
"""
