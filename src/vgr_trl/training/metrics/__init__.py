"""What a step of training tells of itself.

Read `step_metrics.py` (what the loss saw), `clock.py` (how long each stage took), `collapse_watch.py` (signs of a
collapse), `trackers.py` (what trackers get of it).
"""
