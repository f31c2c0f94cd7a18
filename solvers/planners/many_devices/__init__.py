"""Stages along the network's tree for many devices: the fewest devices for a time, by what a device is worth."""
