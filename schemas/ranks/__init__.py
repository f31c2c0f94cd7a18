"""Documents for ranks and launchers: the assignment of one rank, a plan as a bundle for ranks, settings of a launch.

May import: `schemas`.
Start reading at `assignment.py`.
"""
