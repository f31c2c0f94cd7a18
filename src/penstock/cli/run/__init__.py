"""Commands that train: run, rank.

May import: `penstock.cli`, and everything else inside functions.
Start reading at `running.py`.
"""
