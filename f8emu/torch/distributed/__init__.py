"""Float8 over several GPUs, on torch.distributed's own engines."""
