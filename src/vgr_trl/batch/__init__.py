"""Which row, image, tile and column of a rollout batch belongs to whom.

Read `signals.py` (what is measured of a batch), `inputs.py` (a batch as inputs of a scoring pass), `token_columns.py`
(what lies along the tokens), `image_parts.py` (the one map from pixel inputs to rows), `row_images.py` and `pixels.py`
(image inputs by row, and as they are stored), `rows.py` and `joining.py` (rows cut out of batches and put together
again), `placement.py` (which process holds what).
"""
