"""The agent of a node: a state machine without input or output, and the process that executes its decisions.

May import: `schemas`, `executor`; torch never.
Start reading at `state.py`, then `agent.py`.
"""
