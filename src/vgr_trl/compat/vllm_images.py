"""Prompts with images for vLLM: one placeholder token per image where vLLM writes the others itself.

TRL 1.15 and 1.16 give a colocated vLLM the images, and prompts in which every image already takes n placeholder tokens.
vLLM reads the first of them as the whole image and writes n tokens in its place, so the model is prompted with 2n - 1
of them, n - 1 of which stand for nothing. Nothing fails; the completions answer another prompt than the one trained on.
See https://github.com/huggingface/trl/issues/6294.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby, islice
from typing import Any

from packaging.version import Version
from PIL import Image
from trl import GRPOTrainer

from vgr_trl.errors import ConfigError

TRL_RELEASES = ("1.15", "1.17")  # from, up to but without
PROBE_SIZE = (64, 64)


def needs_collapsing(trl_version: str, mode: str) -> bool:
    """Return whether prompts with images have to be collapsed before TRL hands them to vLLM.

    The release of vLLM makes no difference: 0.11 to 0.32 write the placeholders of any prompt of tokens, one per image
    is the input they document, and a release that left other prompts alone would take these too. To a server TRL sends
    processed images with their places in the prompt, which must stay as it is.

    Args:
        trl_version: of the installed package, such as "1.16.0".
        mode: `vllm_mode`, "colocate" or "server".
    """
    first, end = map(Version, TRL_RELEASES)
    return mode == "colocate" and first <= Version(Version(trl_version).base_version) < end


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
        ConfigError: the placeholder tokens of a prompt cannot be told apart into its images.
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
                f"{images} images{'' if mine is None else f' of {mine} tokens'}, which cannot be told apart: put text "
                "between images, or generate with use_vllm=False."
            )
        collapsed.append(list(_with_runs(ids, image_token_id, counts)))
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


def _with_runs(ids: Sequence[int], token: int, lengths: Sequence[int]) -> Iterator[int]:
    """The tokens `ids`, in which the runs of `token` get other lengths."""
    remaining = iter(lengths)
    for is_token, run in groupby(ids, token.__eq__):
        yield from [token] * next(remaining) if is_token else run


@dataclass(frozen=True)
class VLLMImages:
    """What TRL has to be given to generate with vLLM.

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
    mode = args.vllm_mode
    if not needs_collapsing(version("trl"), mode):
        return VLLMImages()
    processor: Any = trainer.processing_class
    if repeats_one_token(processor):
        token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        return VLLMImages(token, getattr(processor.image_processor, "merge_size", None))
    why_not = (
        f"use_vllm is on with vllm_mode={mode} and {type(processor).__name__}, which writes more for an image than one "
        f"repeated token: TRL {version('trl')} would have vLLM write that a second time, so set use_vllm=False."
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
    return runs == 1 and list(_with_runs(written, token, [1])) == list(unexpanded)
