"""Families of Hugging Face's models, and how the configuration of each is read.

May import: `schemas`.
Start reading at `table.py`, whose rows are the families; `config.py` has the values, with their places in errors.
"""
