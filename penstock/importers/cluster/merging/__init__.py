"""Facts of several sources become one topology."""
