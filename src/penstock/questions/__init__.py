"""Questions as people ask them: the table of questions with an immediate answer, plans, sweeps, layouts of trainers.

May import: `schemas`, `facts`, `shapes`, `solvers`, `importers`, `examples`, `convert`, `layouts`, `planning`,
`placing`, `calibration`, `report`, `exporting`, `workers`.
Start reading at `table.py`.
"""
