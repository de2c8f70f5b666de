"""The runner of the suite: stages, subjects, oracles, results."""
