"""Which groups are trained on: read `choose.py`, then what it calls."""
