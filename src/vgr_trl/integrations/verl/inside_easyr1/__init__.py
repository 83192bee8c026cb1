"""Where the signals are hung in EasyR1, at commit b44b311; all but `rewards.py` import it: begin with `main.py`."""
