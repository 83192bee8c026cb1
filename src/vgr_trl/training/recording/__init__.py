"""What a run leaves for people to look at: read `record.py`, then what it calls; `card.py` is the model card."""
