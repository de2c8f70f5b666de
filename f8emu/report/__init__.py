"""The result of a run as a page: terminal, HTML, JSON."""
