"""Metrics of a run: means over processes, of micro-batches, seconds of stages, signs of collapse."""
