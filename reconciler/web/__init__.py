"""Read-only status page, metrics and webhook."""
