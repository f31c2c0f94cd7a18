"""Who may do what: keys, what they open, and what any of them may ask for in a while."""
