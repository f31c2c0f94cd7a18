"""Deaths at random moments, and whether everything goes on: of ``training``, of the ``service``."""
