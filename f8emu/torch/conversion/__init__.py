"""Conversion of a model's linear layers, and its report."""
