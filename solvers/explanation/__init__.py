"""What a judged plan's time is made of, what binds it, and what would make it shorter; no input, no output.

May import: `solvers` below `solve`.
Start reading at `binding.py`, then `what_if.py`.
"""
