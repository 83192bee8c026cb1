"""How a question is written down for the model.

Read `prompts.py`, `marks.py` (places of images), `special.py` (what a tokenizer would misread).
"""
