"""The agent of a node: a state machine, and what does as it decides."""
