"""Float8Linear and the code around it: autograd, delayed scaling, checkpointing, conversion."""
