"""A server of vLLM that dies while it is asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from vgr_trl.errors import VLLMServerError
from vgr_trl.training.constructed import ConstructedTrainer


@contextmanager
def named_server(trainer: ConstructedTrainer) -> Iterator[None]:
    """In this block, a server that cannot be reached is an error that says so, and what to do.

    TRL's client has then asked it again for about a minute.

    Raises:
        VLLMServerError: in the process that asks it.
    """
    try:
        yield
    except OSError as error:  # as are all errors of requests
        if not trainer.use_vllm or trainer.vllm_mode != "server":
            raise
        raise VLLMServerError(
            f"The vLLM server at {trainer.vllm_generation.vllm_client.base_url} did not answer in step "
            f"{trainer.state.global_step + 1} ({' '.join(str(error).split())[:200]}): start it again, then continue "
            "with --resume_from_checkpoint."
        ) from error
