"""Why the VGR reward does not lower VGR on the demo, and what it costs.

Read `variants.py` (what is trained), `looks.py` (VGR of completions, and how they differ within a prompt's group), then
`__main__.py` (runs) and `report.py` (tables).
"""
