"""Run in a process of its own with an evaluator of CEL on the path: what rules say of values.

Reads a list of ``[rule, value]``, writes for each true, false, or why it could not be evaluated.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import cel

    results = []
    for rule, value in json.load(sys.stdin):
        try:
            results.append(cel.evaluate(rule, {"self": value}))
        except Exception as error:
            results.append(f"{rule}: {error}")
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
