"""Diagnosis of wrong kernels: rules as data, alterations tried on probes, rules measured."""
