"""Repairs of faults in TRL with vLLM, each with its link and the condition under which it can be removed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate, groupby, islice, pairwise
from typing import Any

from PIL import Image
from trl import GRPOTrainer
from trl.generation import vllm_client

from vgr_trl.utils import ConfigError, VLLMServerError, error_text, patched_attribute

# vLLM's cache of image features, reset with new weights.
#
# vLLM keeps image features by the content of the image alone. With new weights TRL 1.16 resets vLLM's prefix cache, but
# not this cache, so an image of an earlier step is answered with features of the earlier weights, without an error. See
# https://github.com/huggingface/trl/issues/7198; removable with a TRL that calls `reset_encoder_cache` itself.


def forget_with_new_weights(trainer: GRPOTrainer) -> None:
    """Reset vLLM's cache of image features whenever it gets new weights.

    Args:
        trainer: constructed.

    Raises, with new weights:
        VLLMServerError: the server refuses to reset its cache.
    """
    if not (trainer.use_vllm and trainer._is_vlm):
        return
    generation: Any = trainer.vllm_generation
    plain = generation.sync_weights

    def sync_weights() -> None:
        plain()
        if generation.mode == "colocate":
            generation.llm.llm_engine.reset_encoder_cache()
        elif generation.accelerator.is_main_process:
            client = generation.vllm_client
            answer = client.session.post(f"{client.base_url}/reset_encoder_cache")
            if answer.status_code != 200:
                answers = f"The vLLM server at {client.base_url} answers reset_encoder_cache with {answer.status_code}"
                effect = "would keep image features of older weights"
                cure = "start a release from 0.22 on, with VLLM_SERVER_DEV_MODE=1"
                raise VLLMServerError(f"{answers}, and {effect}: {cure}.")

    generation.sync_weights = sync_weights


# Prompts with images for vLLM, with one placeholder token per image.
#
# TRL 1.15 and 1.16 give a colocated vLLM prompts in which every image already has n placeholder tokens. vLLM expands
# the first of them to n tokens, so the prompt gets 2n - 1 placeholders, n - 1 of them without features. Nothing fails,
# but completions answer another prompt than training uses. vLLM 0.11 to 0.32 all expand the placeholders of token
# prompts, and document one placeholder per image as their input. See https://github.com/huggingface/trl/issues/6294.

PROBE_SIZE = (64, 64)
AFTER_IMAGES = (
    "and whether completions that vLLM goes on with behind them have the model's log-probabilities is untested: set "
    "use_vllm=False, or use tools that return text."
)


def collapse_images(
    prompt_ids: Sequence[Sequence[int]],
    images_per_prompt: Sequence[int],
    image_token_id: int,
    tokens_per_image: Sequence[int] | None = None,
) -> list[list[int]]:
    """Collapse the placeholders of each image to a single placeholder token.

    Args:
        prompt_ids: tokens of N prompts.
        images_per_prompt: (N,) number of images.
        image_token_id: the placeholder token, once or more for each image.
        tokens_per_image: number of placeholder tokens of every image, prompt after prompt; None: unknown, which is
            enough if no two images are adjacent.

    Raises:
        ConfigError: it is ambiguous which placeholder tokens of a prompt belong to which image.
    """
    is_known = tokens_per_image is not None and len(tokens_per_image) == sum(images_per_prompt)
    sizes = iter(tokens_per_image or ()) if is_known else iter(())
    collapsed = []
    for row, (ids, images) in enumerate(zip(prompt_ids, images_per_prompt, strict=True)):
        runs = [len(list(run)) for is_image, run in groupby(ids, image_token_id.__eq__) if is_image]
        counts = _images_per_run(runs, images, list(islice(sizes, images)))
        if counts is None:
            found = f"Prompt {row} has {len(runs)} runs of the image token {image_token_id}, of {runs} tokens"
            cure = "put text between images, or generate with use_vllm=False"
            raise ConfigError(f"{found}, for {images} images, so which belong to which image is ambiguous: {cure}.")
        collapsed.append(list(_replace_runs(ids, image_token_id, counts)))
    return collapsed


def _images_per_run(runs: Sequence[int], images: int, sizes: Sequence[int]) -> list[int] | None:
    """Return the number of images in each run of placeholders; None: ambiguous.

    Args:
        runs: length of each run.
        images: number of images of the prompt.
        sizes: number of placeholders of each image; empty: unknown.
    """
    if len(runs) == images:
        return [1] * images
    ends, image_ends = list(accumulate(runs)), list(accumulate(sizes))
    if ends[-1:] != image_ends[-1:] or not set(ends) <= set(image_ends):
        return None
    places = [0, *(image_ends.index(end) + 1 for end in ends)]
    return [after - before for before, after in pairwise(places)]


def _replace_runs(ids: Sequence[int], token: int, lengths: Sequence[int]) -> Iterator[int]:
    """Yield tokens, with new lengths for the runs of `token`."""
    remaining = iter(lengths)
    for is_token, run in groupby(ids, token.__eq__):
        yield from [token] * next(remaining) if is_token else run


@dataclass(frozen=True)
class VLLMImages:
    """Prepares prompts and images for TRL's generation with vLLM.

    Attributes:
        image_token_id: placeholder token of images; None: prompts are unchanged.
        merge_size: number of patches along each side that the image processor merges into one token; None: it does not
            return `image_grid_thw`.
        why_not: why prompts with images cannot be used; None: they can.
    """

    image_token_id: int | None = None
    merge_size: int | None = None
    why_not: str | None = None

    def prepared(self, prompt_ids: Any, images: Any, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return prompts and images for vLLM.

        Args:
            prompt_ids: tokens of N prompts.
            images: lists of images of N prompts; None: no prompt has images.
            fields: other outputs of the processor; `image_grid_thw` is (images, 3).

        Raises:
            ConfigError: see `collapse_images` and `plan_vllm_images`.
        """
        if images is None:
            return prompt_ids, None
        if self.why_not is not None:
            raise ConfigError(self.why_not)
        if self.image_token_id is not None:
            grid, tokens = fields.get("image_grid_thw"), None
            if grid is not None and self.merge_size is not None:
                tokens = [int(t) * int(h) * int(w) // self.merge_size**2 for t, h, w in grid]
            prompt_ids = collapse_images(prompt_ids, [len(row or ()) for row in images], self.image_token_id, tokens)
        return prompt_ids, [row or None for row in images]  # TRL reads the first image of every list


def plan_vllm_images(trainer: GRPOTrainer, has_images: bool) -> VLLMImages | None:
    """Return how to prepare prompts for vLLM; None: no preparation is needed.

    Args:
        trainer: constructed.
        has_images: whether the data have images.

    Raises:
        ConfigError: prompts with images have to be collapsed, but the processor does not write images as repetitions
            of one token. Without images in the data, the first image raises it.
    """
    if not (trainer.use_vllm and trainer._is_vlm):
        return None
    args: Any = trainer.args
    if args.vllm_mode != "colocate":  # TRL sends a server processed images with their positions
        return VLLMImages()
    processor: Any = trainer.processing_class
    if repeats_one_token(processor):
        token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        return VLLMImages(token, getattr(processor.image_processor, "merge_size", None))
    given = f"use_vllm is on with vllm_mode=colocate and {type(processor).__name__}"
    effect = f"TRL {version('trl')} would have vLLM write that a second time"
    why_not = f"{given}, which writes more for an image than one repeated token: {effect}, so set use_vllm=False."
    if has_images:
        raise ConfigError(why_not)
    return VLLMImages(why_not=why_not)


def repeats_one_token(processor: Any) -> bool:
    """Return whether a processor writes every image as repetitions of its `image_token` alone.

    True for LLaVA, LLaVA-Next and the Qwen-VL family. False for Gemma 3, InternVL, Idefics3 and SmolVLM, which add
    tokens around an image or between its tiles, for processors without an `image_token`, and for processors that expect
    another token in the text (Gemma 3 before transformers 5.11).
    """
    text = getattr(processor, "image_token", None)
    if not isinstance(text, str):
        return False
    token = processor.tokenizer.convert_tokens_to_ids(text)
    unexpanded = processor.tokenizer([text])["input_ids"][0]
    try:
        written = processor(text=[text], images=[[Image.new("RGB", PROBE_SIZE)]])["input_ids"][0]
    except ValueError:
        return False
    runs = sum(is_image for is_image, _ in groupby(written, token.__eq__))
    return runs == 1 and list(_replace_runs(written, token, [1])) == list(unexpanded)


# Log-probabilities of a server of vLLM 0.32, for TRL 1.16.
#
# TRL reads each token's `token`, a text such as "token_id:17", which vLLM sent up to 0.31. From 0.32 on
# `/inference/v1/generate` sends its `token_id`, a number, and TRL fails with a KeyError. Removable with a TRL that
# reads both.


@contextmanager
def answers_of_server(trainer: GRPOTrainer) -> Iterator[None]:
    """Read both forms of a server's log-probabilities in this block, and explain connection errors.

    TRL's client retries for about a minute before it fails.

    Raises:
        VLLMServerError: the server does not answer; raised in the process that calls it.
    """
    plain = vllm_client.parse_logprobs
    try:
        with patched_attribute(vllm_client, "parse_logprobs", lambda choices: plain([*map(fill_texts, choices)])):
            yield
    except OSError as error:  # base of all errors of requests
        server = f"The vLLM server at {trainer.vllm_generation.vllm_client.base_url}"
        found = f"did not answer in step {trainer.state.global_step + 1} ({error_text(error)})"
        cure = "start it again, then continue with --resume_from_checkpoint"
        raise VLLMServerError(f"{server} {found}: {cure}.") from error


def fill_texts(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Add a `token` for every `token_id` to the log-probabilities of a completion, the likeliest tokens included."""
    if logprobs is None or "content" not in logprobs:
        return logprobs
    content = [
        {**_fill_text(entry), "top_logprobs": [_fill_text(top) for top in entry.get("top_logprobs") or ()]}
        for entry in logprobs["content"] or ()
    ]
    return {**logprobs, "content": content}


def _fill_text(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": f"token_id:{entry.get('token_id')}", **entry}
