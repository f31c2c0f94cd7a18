"""Ranks that another launcher starts: srun, torchrun, a person.

``environment`` reads the launcher's variables, ``rendezvous`` lets processes learn of each other, ``places`` gives each
process its rank, ``process`` trains. The launcher's own order of ranks decides nothing: a process finds its stage by
the name of its node and its number there.

May import: `schemas`, `executor`.
Start reading at `process.py`.
"""
