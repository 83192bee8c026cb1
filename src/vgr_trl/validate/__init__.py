"""Checks and plans before the first generation: options, data, and work that passes share and skip."""
