"""Where the signals are hung in EasyR1, at commit b44b311; all but `rewards.py` import it.

Read `main.py` (the command), `hooks.py` (worker and trainer), `actor.py`, `registered.py`, `rewards.py` and
`transformers5.py`.
"""
