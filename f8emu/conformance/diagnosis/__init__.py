"""What a kernel does instead: rules as data, alterations tried on probes, rules measured."""
