"""Completions without image tokens: TRL before 1.16 lets the policy sample them.

A sampled image token stands for an image that is not there, and the next pass fails (`Image features and image tokens
do not match`). TRL 1.16 suppresses it; this does the same. Removable with TRL 1.15.
"""

from typing import Any

from packaging.version import Version
from transformers import GenerationConfig, ProcessorMixin
from trl import GRPOTrainer

from vgr_trl.trl_release import release


def suppress_image_tokens(trainer: GRPOTrainer, installed: str | None = None) -> None:
    """Let the constructed `trainer` generate no image tokens, where TRL does not see to it.

    Args:
        trainer: with transformers' generation; one with vLLM's is left alone, as by TRL.
    """
    model: Any = trainer.model
    token = getattr(model.config, "image_token_id", None)
    if release(installed) >= Version("1.16") or trainer.use_vllm or token is None:
        return
    if isinstance(trainer.processing_class, ProcessorMixin):
        options = {"suppress_tokens": [token], **trainer.generation_kwargs}
        trainer.generation_kwargs = options
        trainer.generation_config = GenerationConfig(**options, disable_compile=True)
