"""Reads what Slurm writes and prints.

May import: `importers.cluster`, `schemas`.
Start reading at `slurm_conf.py`.
"""
