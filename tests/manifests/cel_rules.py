"""A separate process with an evaluator of CEL on the path: the results of rules on values.

The process reads a list of ``[rule, value]``, and writes for each true, false, or why it could not be evaluated.
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
