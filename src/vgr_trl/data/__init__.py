"""Data sets: read from files and the hub, checked, prepared for training, converted to one schema, inspected."""
