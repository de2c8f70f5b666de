"""What differing cases have in common, how far outputs are off, and where."""
