"""Where the signals are hung in verl 0.9.1; imports verl: begin with `plugin.py`."""
