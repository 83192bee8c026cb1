"""Features of images that vLLM keeps: forgotten when it gets new weights.

vLLM keeps what the vision tower makes of an image, by the content of the image alone. After new weights TRL 1.16 has it
forget the prompts it has read, not the images, so an image that came in an earlier step is answered as the earlier
weights saw it. Nothing fails. See https://github.com/huggingface/trl/issues/7198; to be removed with a TRL that calls
`reset_encoder_cache` itself.
"""

from typing import Any

from trl import GRPOTrainer

from vgr_trl.errors import VLLMServerError


def forget_with_new_weights(trainer: GRPOTrainer) -> None:
    """Have the vLLM of a constructed trainer of images forget their features whenever it gets new weights."""
    if not (trainer.use_vllm and trainer._is_vlm):
        return
    generation: Any = trainer.vllm_generation
    plain = generation.sync_weights

    def sync_weights() -> None:
        plain()
        forget_image_features(generation)

    generation.sync_weights = sync_weights


def forget_image_features(generation: Any) -> None:
    """Empty the cache of image features of vLLM, by the process that speaks to it.

    Raises:
        VLLMServerError: the server refuses.
    """
    if generation.mode == "colocate":
        generation.llm.llm_engine.reset_encoder_cache()
    elif generation.accelerator.is_main_process:
        client = generation.vllm_client
        answer = client.session.post(f"{client.base_url}/reset_encoder_cache")
        if answer.status_code != 200:
            raise VLLMServerError(
                f"The vLLM server at {client.base_url} answers reset_encoder_cache with {answer.status_code}, and "
                "would go on with features of images from older weights: start a release from 0.22 on, with "
                "VLLM_SERVER_DEV_MODE=1."
            )
