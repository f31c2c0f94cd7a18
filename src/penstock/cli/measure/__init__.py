"""Commands that measure costs: profile, probe, calibrate, tune.

May import: `penstock.cli`, and everything else inside functions.
Start reading at `profiling.py`.
"""
