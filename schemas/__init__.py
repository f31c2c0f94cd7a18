"""The documents that travel, the words of a program, and every error."""
