"""Published steps against what users of Penstock get: rows, predictions, scores (docs/benchmarks.md)."""
