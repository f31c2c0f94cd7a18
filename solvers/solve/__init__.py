"""A solve: the page to read first is ``driver.py``; the driver's words are those of docs/planning.md."""
