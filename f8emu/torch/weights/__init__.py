"""Weights that travel or rest as float8."""
