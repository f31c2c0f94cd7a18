"""Models of Hugging Face's library as jobs of this executor, from a config.json alone: nothing is downloaded.

May import: `schemas`, `executor.run`.
Start reading at `job.py`, which makes a chain of layers; `pieces.py` takes the library's model apart.
"""
