"""The service in a browser: what each page shows, and how it is rendered."""
