"""The execution of one rank's program: binding, instructions, batches under way.

May import: `schemas`, `executor.stage`, `executor.transport`.
Start reading at `interpreter.py`.
"""
