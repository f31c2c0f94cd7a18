"""Merges the facts of several sources into one topology.

May import: `importers.cluster`, `schemas`.
Start reading at `merge.py`.
"""
