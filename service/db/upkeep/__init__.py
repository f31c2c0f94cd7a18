"""What keeps a database in order: checks, backups, and the removal of what nobody needs any more."""
