"""The documents that travel, the instructions of programs, and every error.

May import: pydantic, and nothing else of Penstock.
Start reading at `request.py` (a question) and `plan.py` (an answer).
"""
