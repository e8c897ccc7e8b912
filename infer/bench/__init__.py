"""Benchmarks of an engine in this process."""
