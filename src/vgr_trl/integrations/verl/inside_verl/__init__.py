"""Where the signals are hung in verl 0.9.1; imports verl.

Read `plugin.py` (what is hung in), `engine.py` and `trainer.py` (the pass and the steps around it), `registered.py`
(estimators and losses by name), then what verl does by itself: `cached_forward.py`, `flash_calls.py`, `trl_release.py`.
"""
