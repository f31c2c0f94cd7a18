"""Questions as people ask them: a plan, a sweep, a layout of another trainer, answered on this machine.

May import: `schemas`, `shapes`, `solvers`, `convert`, `layouts`, `planning`, `report`, `exporting`, `workers`.
Start reading at `answer.py`.
"""
