"""Facts of devices that profiles, clusters and ranks read: the table of peaks and efficiencies by kind.

May import: `schemas`.
Start reading at `device_table.py`.
"""
