"""From traces to costs: observations, and the fits of layers and links.

May import: `schemas`, `convert`, `planning`, `solvers`.
Start reading at `calibrate.py`.
"""
