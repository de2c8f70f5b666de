"""torch's own float8 operators with the bits of a chip, on devices that are not it."""
