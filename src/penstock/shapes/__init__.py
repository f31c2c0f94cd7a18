"""Shapes of transformers: their parameters, legal degrees of parallelism and memory per GPU, in closed form.

May import: `schemas`.
Start reading at `memory.py`; `layout.py` has the words, `legality.py` the rules, `hugging_face.py` reads config.json.
"""
