"""How numba compiles our kernels, and the heap that several of them share.

May import: Nothing of ours.
Start reading at `decorators.py`.
"""
