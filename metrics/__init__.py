"""Prometheus metrics of the engine: names, observer, exporter and reader."""
