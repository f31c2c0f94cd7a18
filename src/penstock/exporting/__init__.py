"""Plans as files of other programs: a form is a line of `forms.FORMS`; forms that start ranks are in `manifests`.

May import: `schemas`, `solvers`, `convert`, `layouts`, `planning`, `manifests`, `report`.
Start reading at `forms.py`.
"""
