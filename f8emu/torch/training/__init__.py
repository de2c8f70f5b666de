"""Float8Linear and what surrounds it: autograd, delayed scaling, checkpointing, conversion."""
