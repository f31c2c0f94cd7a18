"""Output for people: a plan as an HTML page, an SVG, a trace, tables and sentences.

May import: `schemas`, `solvers`, `layouts`, `planning`, `calibration`.
Start reading at `view.py`, then `templates/` and `drawing/`.
"""
