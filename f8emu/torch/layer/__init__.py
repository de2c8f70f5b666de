"""Float8Linear, its matrix products and what it saves."""
