"""Images made harder to see.

Read `images.py`, `layout.py` and `diffusion.py` with `modes.py`, then `conversations.py`.
"""
