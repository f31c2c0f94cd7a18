"""What layers cost: measured on devices that are all busy, or computed without them."""
