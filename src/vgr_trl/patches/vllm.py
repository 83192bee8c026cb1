"""Faults of TRL with vLLM: each with its link, and what makes the repair removable."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate, groupby, islice, pairwise
from typing import Any

from PIL import Image
from trl import GRPOTrainer
from trl.generation import vllm_client

from vgr_trl.errors import ConfigError, VLLMServerError, error_text
from vgr_trl.patching import patched_attribute

# Features of images that vLLM keeps: forgotten when it gets new weights.
#
# vLLM keeps what the vision tower makes of an image, by the content of the image alone. After new weights TRL 1.16
# has it forget the prompts it has read, not the images, so an image that came in an earlier step is answered as the
# earlier weights saw it. Nothing fails. See https://github.com/huggingface/trl/issues/7198; to be removed with a TRL
# that calls `reset_encoder_cache` itself.


def forget_with_new_weights(trainer: GRPOTrainer) -> None:
    """Have the vLLM of a constructed trainer of images forget their features whenever it gets new weights.

    Raises, when it gets them:
        VLLMServerError: the server refuses.
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
                effect = "would go on with features of images from older weights"
                cure = "start a release from 0.22 on, with VLLM_SERVER_DEV_MODE=1"
                raise VLLMServerError(f"{answers}, and {effect}: {cure}.")

    generation.sync_weights = sync_weights


# Prompts with images for vLLM: one placeholder token per image where vLLM writes the others itself.
#
# TRL 1.15 and 1.16 give a colocated vLLM the images, and prompts in which every image already takes n placeholder
# tokens. vLLM reads the first of them as the whole image and writes n tokens in its place, so the model is prompted
# with 2n - 1 of them, n - 1 of which stand for nothing. Nothing fails; the completions answer another prompt than the
# one trained on. The release of vLLM makes no difference: 0.11 to 0.32 write the placeholders of any prompt of tokens,
# one per image is the input they document, and a release that left other prompts alone would take these too. See
# https://github.com/huggingface/trl/issues/6294.

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
    """How many images, of `sizes` tokens if that is known, each run of placeholders stands for; None: ambiguous."""
    if len(runs) == images:
        return [1] * images
    ends, image_ends = list(accumulate(runs)), list(accumulate(sizes))
    if ends[-1:] != image_ends[-1:] or not set(ends) <= set(image_ends):
        return None
    places = [0, *(image_ends.index(end) + 1 for end in ends)]
    return [after - before for before, after in pairwise(places)]


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
            grid, tokens = fields.get("image_grid_thw"), None
            if grid is not None and self.merge_size is not None:
                tokens = [int(t) * int(h) * int(w) // self.merge_size**2 for t, h, w in grid]
            prompt_ids = collapse_images(prompt_ids, [len(row or ()) for row in images], self.image_token_id, tokens)
        return prompt_ids, [row or None for row in images]  # of an empty list TRL would take the first image


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
    given = f"use_vllm is on with vllm_mode=colocate and {type(processor).__name__}"
    effect = f"TRL {version('trl')} would have vLLM write that a second time"
    why_not = f"{given}, which writes more for an image than one repeated token: {effect}, so set use_vllm=False."
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
def answers_of_server(trainer: GRPOTrainer) -> Iterator[None]:
    """Read log-probabilities of a server in both forms in this block, and explain the error if it cannot be reached.

    TRL's client has then asked it again for about a minute.

    Raises:
        VLLMServerError: in the process that asks it.
    """
    plain = vllm_client.parse_logprobs
    try:
        with patched_attribute(vllm_client, "parse_logprobs", lambda choices: plain([*map(fill_texts, choices)])):
            yield
    except OSError as error:  # as are all errors of requests
        server = f"The vLLM server at {trainer.vllm_generation.vllm_client.base_url}"
        found = f"did not answer in step {trainer.state.global_step + 1} ({error_text(error)})"
        cure = "start it again, then continue with --resume_from_checkpoint"
        raise VLLMServerError(f"{server} {found}: {cure}.") from error


def fill_texts(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the log-probabilities of a completion with a `token` for every `token_id`, also among the most likely."""
    if logprobs is None or "content" not in logprobs:
        return logprobs
    content = [
        {**_fill_text(entry), "top_logprobs": [_fill_text(top) for top in entry.get("top_logprobs") or ()]}
        for entry in logprobs["content"] or ()
    ]
    return {**logprobs, "content": content}


def _fill_text(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": f"token_id:{entry.get('token_id')}", **entry}
