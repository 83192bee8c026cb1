"""Repairs of faults in TRL with vLLM, each with its link and the condition under which it can be removed."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.core_model_loading import revert_weight_conversion
from trl import GRPOTrainer
from trl.generation import vllm_client

from vgr_trl.errors import ConfigError, VLLMServerError, error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.sharing.model_support import causal_model

# vLLM's cache of image features, reset with new weights.
#
# vLLM keeps image features by the content of the image alone. With new weights TRL 1.16 resets vLLM's prefix cache, but
# not this cache, so an image of an earlier step is answered with features of the earlier weights, without an error. See
# https://github.com/huggingface/trl/issues/7198; removable with a TRL that calls `reset_encoder_cache` itself.


def forget_with_new_weights(generation: Any) -> None:
    """Reset vLLM's cache of image features whenever it gets new weights.

    Args:
        generation: TRL's `VLLMGeneration`.

    Raises, with new weights:
        VLLMServerError: the server refuses to reset its cache.
    """
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


# Weights under the names of a checkpoint.
#
# TRL 1.16 gives vLLM the names that parameters have in the model. transformers renames and regroups parameters when it
# loads a checkpoint, and vLLM reads those of checkpoints: the first rollout of Gemma 3 and LLaVA ends in a ValueError.
# See https://github.com/huggingface/transformers/pull/45448; removable with a TRL that converts them.


def name_weights_as_saved(generation: Any, policy: Any) -> None:
    """Give vLLM the weights of a model with images under the names, and in the form, of a checkpoint.

    Args:
        generation: TRL's `VLLMGeneration`.
        policy: the model, with or without adapters.
    """
    plain, model = generation._iter_named_params, causal_model(policy)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in plain():  # gathered one by one
            yield from revert_weight_conversion(model, {name: weight}).items()

    generation._iter_named_params = named


# Families that vLLM does not serve. Its error lists all families that it serves.


@contextmanager
def naming_unserved_model() -> Iterator[None]:
    """Raise `ConfigError` with one sentence if vLLM is constructed for a model that it does not serve."""
    try:
        yield
    except ValueError as error:
        if not (match := re.search(r"Model architectures \['(\w+)'.*?\] are not supported", str(error))):
            raise
        raise ConfigError(f"The installed vLLM does not serve {match[1]}: set use_vllm=False.") from error


# Prompts with images, as vLLM's own processor expects them.
#
# TRL 1.15 and 1.16 give a colocated vLLM the tokens of the model's processor, which has written every image as many
# tokens. vLLM writes the first of them so again, and completions answer another prompt than training uses, without an
# error. vLLM expects the text of the chat template as the tokenizer alone writes it, of prompts and of tool messages.
# See https://github.com/huggingface/trl/issues/6294; removable with a TRL that has #6718 and #6719, where it does
# nothing.


@dataclass(frozen=True)
class TextProcessor:
    """Writes conversations as the tokens of their text, with one placeholder per image.

    Attributes:
        processor: processor of the model.
    """

    processor: Any

    def apply_chat_template(self, conversation: Any, *, return_dict: bool = False, **options: Any) -> Any:
        """Tokenize conversations like the processor, which adds special tokens by the same rule."""
        text = self.processor.apply_chat_template(conversation, **{**options, "tokenize": False})
        texts = [text] if isinstance(text, str) else text
        tokenizer = self.processor.tokenizer
        has_start = tokenizer.bos_token is not None and texts[0].startswith(tokenizer.bos_token)
        ids = tokenizer(texts, add_special_tokens=not has_start)["input_ids"]
        return {"input_ids": ids} if return_dict else ids


class UnexpandedPrompts:
    """Gives vLLM prompts with unexpanded images, and checks that it expands them as the processor does.

    Attributes:
        texts: tokens of the processor -> tokens of the same text for vLLM: prompts, tool messages, and the rows of
            earlier turns, which later turns continue.
        processor: processor of the model.
        is_server: whether vLLM runs as a server.

    Args:
        generation: TRL's `VLLMGeneration`.
        processor: processor of the model.
    """

    def __init__(self, generation: Any, processor: Any) -> None:
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.processor = processor
        self.is_server = generation.mode == "server"
        plain = generation.generate

        def generate(prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
            if images is None:
                return plain(prompts, None, num_generations, profiler)
            read, *rest = plain([self.unexpand(ids) for ids in prompts], images, num_generations, profiler)
            for ids, answered_ids in zip(prompts, read, strict=True):
                self.refuse_other_images(ids, answered_ids)
            return read, *rest

        generation.generate = generate
        if self.is_server:
            send_images(generation, self.processor)

    @contextmanager
    def as_text(self, trainer: GRPOTrainer) -> Iterator[None]:
        """Let the trainer tokenize conversations without images in this block."""
        with patched_attribute(trainer, "processing_class", TextProcessor(self.processor)):
            yield

    def unexpand(self, ids: Sequence[int]) -> list[int]:
        """Return a row's tokens for vLLM: its prompt or its last turn's row, generated tokens, tool messages."""
        row = tuple(ids)
        lengths = sorted({*map(len, self.texts)}, reverse=True)
        start = next((length for length in lengths if row[:length] in self.texts), 0)
        end = next((length for length in lengths if length <= len(row) - start and row[-length:] in self.texts), 0)
        generated = row[start : len(row) - end]
        tokens = [*self.texts.get(row[:start], ()), *generated, *(self.texts[row[-end:]] if end else ())]
        self.texts[row] = tokens
        return tokens

    def refuse_other_images(self, ids: Sequence[int], read: Sequence[int]) -> None:
        """Raise `ConfigError` if vLLM has read a prompt of another length than the processor wrote."""
        if len(ids) != len(read):
            mismatch = f"vLLM reads a prompt with images as {len(read)} tokens, but {type(self.processor).__name__}"
            sizes = "start the server with the image sizes of that processor (--mm-processor-kwargs), or "
            cure = f"{sizes if self.is_server else ''}set use_vllm=False"
            raise ConfigError(f"{mismatch} writes {len(ids)}, which training uses: {cure}.")


def plan_unexpanded_prompts(generation: Any, processor: Any) -> UnexpandedPrompts | None:
    """Build the object that gives vLLM unexpanded prompts, or return None if this release of TRL does so itself."""
    if "vllm_prompt_ids" in signature(GRPOTrainer._generate_single_turn).parameters:
        return None
    return UnexpandedPrompts(generation, processor)


# Images for a server, which expands their prompts itself.
#
# TRL 1.15 and 1.16 have a server process images on their own, and place the features at runs of one token in expanded
# prompts. That fails for images of several runs (tiles, rows) and for adjacent ones, places the features of Gemma 3 at
# the token before them, and cuts those of a server that writes more tokens than the processor, without an error. From
# 0.30 on a server takes images beside unexpanded prompts, and says what it has read. Removable as the above.


@dataclass(frozen=True)
class ImagesOfPrompts:
    """Sends a server the images of prompts, in place of TRL's `_generate_from_features`.

    Attributes:
        client: TRL's client of the server.
        read: reads an image as the processor of the model does: (3, H, W), integers; None: it has no such method.
    """

    client: Any
    read: Callable[..., Any] | None

    def generate(self, prompts: Sequence[Any], images: Sequence[Any], sampling: dict[str, Any]) -> dict[str, Any]:
        """Return completions of each prompt, and the tokens that the server has read."""
        # Up to 0.31 a server answers with the last sequence alone, unless it is asked for all when they are final.
        sampling = {**sampling, "output_kind": 2}
        with ThreadPoolExecutor(64) as pool:
            answers = [*pool.map(lambda ids, of_row: self.ask(ids, of_row, sampling), prompts, images)]
        choices = [choice for answer in answers for choice in answer["choices"]]
        logprobs, tokens = vllm_client.parse_logprobs([choice["logprobs"] for choice in choices])
        outputs = {"logprobs": logprobs, "logprob_token_ids": tokens}
        outputs["prompt_ids"] = [answer["prompt_token_ids"] for answer in answers]
        return {**outputs, "completion_ids": [choice["token_ids"] for choice in choices]}

    def ask(self, ids: Sequence[int], images: Sequence[Any] | None, sampling: dict[str, Any]) -> Any:
        """Return the server's answer to a prompt.

        Raises:
            VLLMServerError: the server refuses, or does not read images.
        """
        files = [vllm_client.pil_to_base64(self.flatten_transparency(image)) for image in images or ()]
        parts = [{"type": "image_url", "url": f"data:image/png;base64,{file}"} for file in files] or None
        asked = {"model": self.client.model, "token_ids": ids, "content_parts": parts, "sampling_params": sampling}
        url = self.client.base_url
        got = self.client.session.post(f"{url}/inference/v1/generate", json={**asked, "return_token_ids": True})
        answer = check_answer(url, asked, got.json()) if got.status_code == 200 else {}
        if got.status_code == 404 or (answer and not answer.get("prompt_token_ids")):
            cure = "start a release from 0.30 on, with --enable-scale-out"
            raise VLLMServerError(f"The vLLM server at {url} takes no images beside tokens: {cure}.")
        if not answer:
            response = f"{got.status_code}, {' '.join(got.text.split())[:400]}"
            raise VLLMServerError(f"The vLLM server at {url} refuses a prompt with images: {response}")
        return answer

    def flatten_transparency(self, image: Image.Image) -> Image.Image:
        """Flatten an image's transparency like the processor; some put it on white, like a server."""
        if self.read is None or (image.mode == "RGB" and "transparency" not in image.info):
            return image
        return Image.fromarray(np.asarray(self.read(image, do_convert_rgb=True)).transpose(1, 2, 0))


def send_images(generation: Any, processor: Any) -> None:
    """Let TRL's client of a server, which only the main process has, send images with their prompts."""
    if generation.accelerator.is_main_process:
        client = generation.vllm_client
        read = getattr(processor.image_processor, "process_image", None)
        client._generate_from_features = ImagesOfPrompts(client, read).generate
        client.image_features = lambda images: images
        generation._place_features = lambda images, prompt_ids: images


# Log-probabilities of a server of vLLM 0.32, for TRL 1.16.
#
# TRL reads each token's `token`, a text such as "token_id:17", which vLLM sent up to 0.31. From 0.32 on
# `/inference/v1/generate` sends its `token_id`, a number, and TRL fails with a KeyError. Removable with a TRL that
# reads both.


@contextmanager
def answers_of_server(generation: Any, step: int) -> Iterator[None]:
    """Read both forms of a server's log-probabilities in this block, check its answers, and explain connection errors.

    TRL's client retries for about a minute before it fails.

    Args:
        generation: TRL's `VLLMGeneration`.
        step: number of the optimizer step.

    Raises:
        VLLMServerError: the server does not answer, or not as asked; raised in the process that calls it.
    """
    post = vllm_client.VLLMClient._post

    def checked_post(client: Any, url: str, **sent: Any) -> Any:
        return check_answer(url, sent.get("json", {}), post(client, url, **sent))

    try:
        with patched_attribute(vllm_client.VLLMClient, "_post", checked_post):
            yield
    except Exception as error:
        if isinstance(error, VLLMServerError) or not (isinstance(error, OSError) or type(error) is Exception):
            raise  # errors of requests are OSErrors; TRL raises `Exception` for an answer other than 200
        url = generation.vllm_client.base_url
        problem = f"did not answer in step {step} ({error_text(error)})"
        cure = "start it again, then continue with --resume_from_checkpoint"
        raise VLLMServerError(f"The vLLM server at {url} {problem}: {cure}.") from error


def check_answer(url: str, asked: dict[str, Any], answer: Any) -> Any:
    """Check that a server's answer is complete; return it with a `token` for every `token_id`.

    TRL counts completions from the first one on, so that a missing one would shift those of later prompts.

    Args:
        url: address of the request.
        asked: the request, for completions of several prompts, or of one with images; other requests are not checked.
        answer: answer of the server.

    Raises:
        VLLMServerError: a completion is missing, empty, too long, of another prompt, or without its log-probabilities.
    """
    sampling, prompts = asked.get("sampling_params", asked), asked.get("prompt", [None])
    if "n" not in sampling:
        return answer
    with suppress(LookupError, TypeError, ValueError, AttributeError):  # an answer of any shape
        choices = [{**choice, "logprobs": fill_texts(choice["logprobs"])} for choice in answer["choices"]]
        likely: Any = vllm_client.parse_logprobs([choice["logprobs"] for choice in choices])[1]
        expected = [prompt for prompt in prompts for _ in range(sampling["n"])]
        if all(
            prompt in (choice.get("prompt_token_ids"), None)
            and 0 < len(choice["token_ids"]) <= sampling["max_tokens"]
            and all(token in ids for token, ids in zip(choice["token_ids"], of_row, strict=True))
            for prompt, choice, of_row in zip(expected, choices, likely, strict=True)
        ):
            return {**answer, "choices": choices}
    wanted = f"{sampling['n']} completions a prompt, of up to {sampling['max_tokens']} tokens with logprobs"
    raise VLLMServerError(f"The vLLM server at {url} answered {str(answer)[:200]}, not {wanted}: use another release.")


def fill_texts(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Add a `token` for every `token_id` in a completion's log-probabilities, also of its most likely tokens."""
    if "content" not in logprobs:
        return logprobs
    content = [
        {**_fill_text(entry), "top_logprobs": [_fill_text(top) for top in entry.get("top_logprobs") or ()]}
        for entry in logprobs["content"] or ()
    ]
    return {**logprobs, "content": content}


def _fill_text(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": f"token_id:{entry.get('token_id')}", **entry}
