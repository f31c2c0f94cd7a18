"""The timeline and memory pictures: as data for the script, as SVG, folded for many devices.

May import: `schemas`, `solvers`, `calibration.comparing`.
Start reading at `picture.py`, then `payload.py`; `script/` draws in the browser.
"""
