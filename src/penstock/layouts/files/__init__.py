"""Texts that trainers are started with, read without being run: variables of shell scripts, Python configurations.

May import: `schemas`.

Start reading at `shell.py`, or at `configurations.py`: `reader.py` follows statements, `expressions.py` computes.
"""
