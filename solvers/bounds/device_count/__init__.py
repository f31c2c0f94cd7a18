"""A bound for many devices: pipelines of stages apart that keep to a time need more devices than there are."""
