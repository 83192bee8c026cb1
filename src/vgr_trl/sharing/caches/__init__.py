"""What completions read of their prompts: in scoring and training `prefix_cache.py`, or `packed_keys.py` where they are
packed in one row; in generation `growing.py`.
"""
