"""What TRL, transformers, vLLM and gloo get wrong, one fault per file: its link, and what makes the file removable.

In the order of a run: `image_processor.py`, `cpu_timeout.py` and `gloo_exit.py` (its start and end); generation:
`sampled_images.py`, `vllm_images.py`, `vllm_logprobs.py`, `vllm_encoder_cache.py`; passes and loss: `token_types.py`,
`loss_normaliser.py`; tables: `logged_images.py`, `round_logs.py`, `completion_tables.py`; then `resuming_weights.py`.
"""
