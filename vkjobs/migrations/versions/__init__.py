"""The revisions, oldest first. Each is final once released."""
