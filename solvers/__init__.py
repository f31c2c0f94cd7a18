"""Planning, scheduling, judging and proving, on plain frozen arrays."""
