"""Fit the costs of layers and links to traces of training runs.

May import: `schemas`, `convert`, `planning`, `solvers`.
Start reading at `calibrate.py`.
"""
