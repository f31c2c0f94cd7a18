"""Runs lowered programs on torch.distributed, and measures them.

May import: `schemas`, `facts`.
Start reading at `run/rank_main.py`, then `program/interpreter.py`.
"""
