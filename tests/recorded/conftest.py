"""The service of ``tests/service`` serves the recorded exchanges as well."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "service"))
