"""A stage on a rank: its layers, their backward in one or two halves, and all that its step works on."""
