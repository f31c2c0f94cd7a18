"""Megatron-LM's launch scripts and flags, in and out.

May import: `penstock.layouts`, `schemas`.

Start reading at `megatron.py`.
"""
