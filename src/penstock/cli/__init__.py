"""The command line; every command imports what it needs when it runs.

May import: `schemas`, `facts`, `shapes`, `solvers`, `executor`, `importers`, `examples`, `convert`, `layouts`,
`planning`, `manifests`, `placing`, `calibration`, `report`, `exporting`, `workers`, `questions`, `client`,
`service`; all but `schemas.errors` inside functions.
Start reading at `main.py`; the commands are in `plan/`, `measure/`, `run/`, `service/`, `convert/`.
"""
