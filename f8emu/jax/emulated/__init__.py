"""Programs that call JAX's own dots: which of them a Hopper GPU runs as float8 GEMMs, and their bits."""
