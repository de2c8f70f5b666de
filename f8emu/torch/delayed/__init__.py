"""Delayed scaling of torch layers: state, update, checkpoints."""
