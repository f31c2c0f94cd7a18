"""AvgPipe's tuning of the two parallelism degrees: a predictor from one measured run, and the guidelines beside it."""
