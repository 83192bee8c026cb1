"""The images and videos of a row.

Read `places.py` (where files may lie), `opening.py` (pixels, or why there are none), `sizes.py`, `video.py` (frames)
and `image_column.py` (all in one column).
"""
