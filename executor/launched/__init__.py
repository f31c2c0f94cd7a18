"""Ranks that another launcher starts: srun, torchrun, a person.

``launch`` reads what the launcher says, ``meeting`` is the rendezvous at which processes learn of each other, ``seats``
places the ranks, ``work`` trains. The launcher's own order of ranks decides nothing: a process finds its stage by the
name of its node and its number there.
"""
