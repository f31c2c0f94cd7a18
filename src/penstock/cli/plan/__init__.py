"""Commands that make and judge plans: plan, compare, place, sweep, verify, simulate, explain, report, fits.

May import: `penstock.cli`, and everything else inside functions.
Start reading at `planning.py`.
"""
