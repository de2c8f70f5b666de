"""The GEMMs and values that the suite asks for."""
