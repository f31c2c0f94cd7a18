"""Ranks that another launcher starts: srun, torchrun, a person.

``environment`` reads the launcher's variables, ``rendezvous`` lets processes find each other, ``rank_places`` gives
each process its rank, ``process`` trains. The launcher's order of ranks does not matter: a process finds its stage by
the name of its node and its number there.

May import: `schemas`, `executor`.
Start reading at `process.py`.
"""
