"""The casts of a matrix: its two operands, whole or sharded, and their state under delayed scaling."""
