"""Float8 checkpoints for the servers of other stacks."""
