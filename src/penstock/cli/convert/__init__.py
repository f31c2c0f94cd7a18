"""Commands that convert: import and export.

May import: `penstock.cli`, and everything else inside functions.
Start reading at `importing.py`.
"""
