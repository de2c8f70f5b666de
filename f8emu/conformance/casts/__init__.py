"""Casts and quantizers that are put to the suite: what they are asked, and what a wrong one does instead."""
