"""Captured training steps: reading them, computing them again, comparing them."""
