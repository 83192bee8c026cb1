"""Run vision towers less often, and faster.

`preprocessing.py` processes equal images once, `feature_cache.py` keeps their features during a rollout, `windows.py`
attends within all windows in one call, and `dummy_image.py` runs the tower in processes without images.
"""
