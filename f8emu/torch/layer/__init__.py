"""Float8Linear and its base class, its matrix products and what it saves."""
