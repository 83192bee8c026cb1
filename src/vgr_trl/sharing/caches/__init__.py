"""What completions read of their prompts: `prefix_cache.py` in scoring and training, `growing.py` in generation."""
