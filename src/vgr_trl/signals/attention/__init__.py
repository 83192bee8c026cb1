"""Attention mass, measured while a model computes.

Read `probe.py`, `passes.py` (what passes at a time), `second_call.py` (the kernel asked again), `generated.py` (in
generation).
"""
