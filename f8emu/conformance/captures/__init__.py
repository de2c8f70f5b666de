"""Captured steps of training: read, computed again, compared."""
