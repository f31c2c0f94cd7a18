"""Ranks that somebody else's launcher starts: srun, torchrun, a person.

``launch`` reads what the launcher says, ``seats`` decides who is which rank, ``meeting`` is how processes learn of each
other, ``work`` trains. The launcher's own order of ranks decides nothing: a process finds its stage by the name of its
node and its number there.

May import: `schemas`, `executor`.
Start reading at `process.py`.
"""
