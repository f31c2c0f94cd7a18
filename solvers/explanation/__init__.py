"""What a judged plan's time is made of, what binds it, and what would make it shorter. Pure: no input, no output."""
