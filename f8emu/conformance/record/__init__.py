"""New evidence, recorded on a GPU."""
