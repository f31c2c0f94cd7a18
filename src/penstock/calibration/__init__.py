"""Fit the costs of layers and links to traces of training runs.

May import: `schemas`, `facts`, `solvers`, `executor`, `convert`, `planning`.
Start reading at `calibrate.py`.
"""
