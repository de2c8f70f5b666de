"""Layers on several devices: FSDP2, tensor parallelism, checkpoints."""
