"""Models, profiles and clusters by name, samples of what clusters print, and schedulers that use Penstock.

May import: `schemas`, `facts`, `shapes`, `executor`, `importers`.
Start reading at `catalogue.py`.
"""
