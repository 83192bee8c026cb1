"""Images made harder to see: `images.py` with `modes.py`, then `prompts.py` (conversations that show them)."""
