"""What a model card says beyond TRL's: `model_card.py`, `model_use.py` and `papers.py`."""
