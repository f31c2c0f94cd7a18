"""What keeps a database in order: checks, backups, and the removal of what is not needed any more."""
