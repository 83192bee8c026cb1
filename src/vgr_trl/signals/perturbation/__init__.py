"""Images made harder to see: read `images.py`, `layout.py` and `diffusion.py` with `modes.py`, then `prompts.py`."""
