"""Training: `dot_general` under a recipe, with its backward pass, and the state of delayed scaling."""
