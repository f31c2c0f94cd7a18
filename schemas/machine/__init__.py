"""Facts about this machine that all packages need. Standard library only.

May import: nothing of Penstock.
Start reading at `processors.py`.
"""
