#!/usr/bin/env python3
"""Check of how docstrings, comments, names and pages are written: ``python .ci/sentences.py`` (docs/extending.md)."""

import sys

from sentences.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
