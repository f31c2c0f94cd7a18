"""Rules for the English of this repository and the counts of faults per file, which may only fall.

May import: the standard library.

Start reading at `rules.py`: each rule with its remedy. `python_text.py` and `page_text.py` read sources and pages,
`prose.py` splits text into sentences, `dotted.py` resolves dotted names, `ratchet.py` compares counts with
``.ci/sentences.json``, and `command.py` prints.
"""
