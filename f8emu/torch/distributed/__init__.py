"""Float8 on several GPUs, built on torch.distributed: FSDP2, tensor parallelism, checkpoints."""
