"""Faults of TRL with vLLM: each with its link, and what makes the repair removable."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby, islice
from typing import Any

from PIL import Image
from trl import GRPOTrainer
from trl.generation import vllm_client

from vgr_trl.utils import ConfigError, VLLMServerError, patched_attribute

# Features of images that vLLM keeps: forgotten when it gets new weights.
#
# vLLM keeps what the vision tower makes of an image, by the content of the image alone. After new weights TRL 1.16
# has it forget the prompts it has read, not the images, so an image that came in an earlier step is answered as the
# earlier weights saw it. Nothing fails. See https://github.com/huggingface/trl/issues/7198; to be removed with a TRL
# that calls `reset_encoder_cache` itself.


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


# Prompts with images for vLLM: one placeholder token per image where vLLM writes the others itself.
#
# TRL 1.15 and 1.16 give a colocated vLLM the images, and prompts in which every image already takes n placeholder
# tokens. vLLM reads the first of them as the whole image and writes n tokens in its place, so the model is prompted
# with 2n - 1 of them, n - 1 of which stand for nothing. Nothing fails; the completions answer another prompt than the
# one trained on. The release of vLLM makes no difference: 0.11 to 0.32 write the placeholders of any prompt of tokens,
# one per image is the input they document, and a release that left other prompts alone would take these too. See
# https://github.com/huggingface/trl/issues/6294.

PROBE_SIZE = (64, 64)


def collapse_images(
    prompt_ids: Sequence[Sequence[int]],
    images_per_prompt: Sequence[int],
    image_token_id: int,
    tokens_per_image: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the prompts with one placeholder token for each image; images that touch stay apart.

    Args:
        prompt_ids: tokens of N prompts.
        images_per_prompt: images of each of the N prompts.
        image_token_id: the placeholder token, which stands once or more for each image.
        tokens_per_image: placeholder tokens of every image, prompt after prompt; None: not known, which is enough as
            long as no two images touch.

    Raises:
        ConfigError: it is ambiguous which placeholder tokens of a prompt belong to which image.
    """
    sizes = None
    if tokens_per_image is not None and len(tokens_per_image) == sum(images_per_prompt):
        sizes = iter(tokens_per_image)
    collapsed = []
    for row, (ids, images) in enumerate(zip(prompt_ids, images_per_prompt, strict=True)):
        mine = None if sizes is None else list(islice(sizes, images))
        runs = [len(list(run)) for is_image, run in groupby(ids, image_token_id.__eq__) if is_image]
        counts = _images_per_run(runs, images, mine)
        if counts is None:
            raise ConfigError(
                f"Prompt {row} has {len(runs)} runs of the image token {image_token_id}, of {runs} tokens, for "
                f"{images} images{'' if mine is None else f' of {mine} tokens'}, so which of them "
                "belong to which image is ambiguous: put text between images, or generate with use_vllm=False."
            )
        collapsed.append(list(_replace_runs(ids, image_token_id, counts)))
    return collapsed


def _images_per_run(runs: Sequence[int], images: int, sizes: Sequence[int] | None) -> list[int] | None:
    """How many images each run of placeholder tokens stands for; None if that cannot be told."""
    if len(runs) == images:
        return [1] * images
    if sizes is None:
        return None
    counts, rest = [], list(sizes)
    for length in runs:
        count = 0
        while length > 0 and rest:
            length -= rest.pop(0)
            count += 1
        if length != 0:
            return None
        counts.append(count)
    return None if rest else counts


def _replace_runs(ids: Sequence[int], token: int, lengths: Sequence[int]) -> Iterator[int]:
    """The tokens `ids`, in which the runs of `token` get other lengths."""
    remaining = iter(lengths)
    for is_token, run in groupby(ids, token.__eq__):
        yield from [token] * next(remaining) if is_token else run


@dataclass(frozen=True)
class VLLMImages:
    """Prompts and images in the form that TRL needs to generate with vLLM.

    Attributes:
        image_token_id: the placeholder token of images; None if prompts stay as the processor wrote them.
        merge_size: of the image processor, which merges so many patches along each side into one token; None if it has
            none, and no `image_grid_thw`.
        why_not: why prompts with images cannot be generated from, if they cannot.
    """

    image_token_id: int | None = None
    merge_size: int | None = None
    why_not: str | None = None

    def prepared(self, prompt_ids: Any, images: Any, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return prompts and images as TRL has to hand them to vLLM.

        Args:
            fields: what the processor made beside the tokens; `image_grid_thw`, if there is one, is (images, 3).

        Raises:
            ConfigError: see `collapse_images` and `plan_vllm_images`.
        """
        if images is None:
            return prompt_ids, None
        if self.why_not is not None:
            raise ConfigError(self.why_not)
        if self.image_token_id is not None:
            counts = [len(row or ()) for row in images]
            prompt_ids = collapse_images(prompt_ids, counts, self.image_token_id, self._tokens_per_image(fields))
        return prompt_ids, [row or None for row in images]  # of an empty list TRL would take the first image

    def _tokens_per_image(self, fields: Mapping[str, Any]) -> list[int] | None:
        grid = fields.get("image_grid_thw")
        if grid is None or self.merge_size is None:
            return None
        return [int(t) * int(h) * int(w) // self.merge_size**2 for t, h, w in grid]


def plan_vllm_images(trainer: GRPOTrainer, has_images: bool) -> VLLMImages | None:
    """Return what stands between the prompts and vLLM in the constructed `trainer`; None if nothing does.

    Raises:
        ConfigError: prompts with images have to be collapsed, but the processor does not write images as repetitions
            of one token. If the data have no images, this is raised when the first arrives.
    """
    if not (trainer.use_vllm and trainer._is_vlm):
        return None
    args: Any = trainer.args
    if args.vllm_mode != "colocate":  # to a server TRL sends processed images with their places in the prompt
        return VLLMImages()
    processor: Any = trainer.processing_class
    if repeats_one_token(processor):
        token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        return VLLMImages(token, getattr(processor.image_processor, "merge_size", None))
    why_not = (
        f"use_vllm is on with vllm_mode=colocate and {type(processor).__name__}, which writes more for an image than "
        f"one repeated token: TRL {version('trl')} would have vLLM write that a second time, so set use_vllm=False."
    )
    if has_images:
        raise ConfigError(why_not)
    return VLLMImages(why_not=why_not)


def repeats_one_token(processor: Any) -> bool:
    """Return whether `processor` writes every image as repetitions of its token `image_token`, and nothing else.

    True of LLaVA, LLaVA-Next and the Qwen-VL family. False of Gemma 3, InternVL, Idefics3 and SmolVLM, which add tokens
    around an image or between its tiles, of processors without an `image_token`, and of those that want another token
    in a text for an image (Gemma 3 before transformers 5.11).
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


# Log-probabilities of prompts with images as a server of vLLM 0.32 sends them, for TRL 1.16 to read.
#
# TRL looks for each token's `token`, a text such as "token_id:17", which vLLM sent up to 0.31; from 0.32 on
# `/inference/v1/generate` sends its `token_id`, a number, and TRL ends with a KeyError. To be removed with a TRL that
# reads both.


@contextmanager
def readable_logprobs() -> Iterator[None]:
    """In this block TRL's client reads log-probabilities in both forms."""
    plain = vllm_client.parse_logprobs
    with patched_attribute(
        vllm_client, "parse_logprobs", lambda choices: plain([fill_texts(choice) for choice in choices])
    ):
        yield


def fill_texts(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the log-probabilities of a completion with a `token` for every `token_id`, also among the most likely."""
    if logprobs is None or not logprobs.get("content"):
        return logprobs
    entries = [{**each, "top_logprobs": each.get("top_logprobs") or []} for each in logprobs["content"]]
    for entry in entries:
        entry["top_logprobs"] = [{"token": f"token_id:{top.get('token_id')}", **top} for top in entry["top_logprobs"]]
    content = [{"token": f"token_id:{entry.get('token_id')}", **entry} for entry in entries]
    return {**logprobs, "content": content}
