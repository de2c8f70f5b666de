"""What a run found, as a page: terminal, HTML, JSON."""
