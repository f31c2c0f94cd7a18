"""The planner as a service: jobs, plans, runs and pages over HTTP.

May import: `schemas`, `shapes`, `solvers`, `importers`, `examples`, `convert`, `planning`, `manifests`,
`calibration`, `report`, `exporting`, `workers`, `questions`; torch never.
Start reading at `http/app.py`, then `jobs/submit.py`.
"""
