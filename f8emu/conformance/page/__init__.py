"""A self-contained page of tables and figures, and what is shown on it."""
