"""Configurations that trainers have as Python: Megatron-Bridge's recipes, torchtitan's functions. Nothing is run.

May import: `schemas`, `penstock.layouts.texts`.
Start reading at `configurations.py`; `reader.py` follows statements, `expressions.py` computes plain values.
"""
