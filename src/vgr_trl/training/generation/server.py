"""A server of vLLM: what it answers is read, and one that dies while it is asked is named."""

from collections.abc import Iterator
from contextlib import contextmanager

from vgr_trl.compat.vllm_logprobs import readable_logprobs
from vgr_trl.errors import VLLMServerError
from vgr_trl.training.constructed import ConstructedTrainer


@contextmanager
def named_server(trainer: ConstructedTrainer) -> Iterator[None]:
    """In this block answers of a server are read, and one that cannot be reached is an error that says what to do.

    TRL's client has then asked it again for about a minute.

    Raises:
        VLLMServerError: in the process that asks it.
    """
    if not trainer.use_vllm or trainer.args.vllm_mode != "server":
        yield
        return
    try:
        with readable_logprobs():
            yield
    except OSError as error:  # as are all errors of requests
        raise VLLMServerError(
            f"The vLLM server at {trainer.vllm_generation.vllm_client.base_url} did not answer in step "
            f"{trainer.state.global_step + 1} ({' '.join(str(error).split())[:200]}): start it again, then continue "
            "with --resume_from_checkpoint."
        ) from error
