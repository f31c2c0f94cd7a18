"""Models of Hugging Face's library as jobs of this executor, from a config.json alone, without downloads.

May import: `schemas`, `executor.run`.
Start reading at `job.py`, which builds a chain of layers; `pieces.py` splits the library's model.
"""
