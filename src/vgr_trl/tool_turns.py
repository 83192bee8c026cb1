"""Tools in a rollout: guard their calls, and collect the turns and images of completions."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from vgr_trl.data.images import read_image
from vgr_trl.data.prompts import special_tokens
from vgr_trl.errors import DataError, error_text
from vgr_trl.patches.trl import readable_calls
from vgr_trl.patching import patched_attribute
from vgr_trl.rollout import ConstructedTrainer, describe_row
from vgr_trl.scoring_inputs import ImagesOfRows, Turns
from vgr_trl.views.conversations import process_images


@contextmanager
def guarded(trainer: ConstructedTrainer) -> Iterator[None]:
    """Guard the run in this block against malformed tool calls and results."""
    processor: Any = trainer.processing_class
    guard = ToolGuard(special_tokens(processor), processor.image_processor if trainer._is_vlm else None)
    with ExitStack() as stack:
        stack.enter_context(readable_calls(guard.clean))
        for kind in ("_sync_tool_dicts", "_async_tool_dicts"):
            guarded_tools = [{name: guard.wrap(tool) for name, tool in row.items()} for row in vars(trainer)[kind]]
            stack.enter_context(patched_attribute(trainer, kind, guarded_tools))
        yield


def collect_turns(
    rows: Sequence[Mapping[str, Any]], generated: Sequence[Any], processor: Any, image_token: int | None
) -> Turns:
    """Collect the turns of completions from the return value of TRL's `_generate`.

    Args:
        rows: rows of the data, one per completion.
        generated: return value of `_generate`.
        processor: processor of the model; None for a text model.
        image_token: placeholder token of images.

    Raises:
        DataError: the image tokens of a row do not match its images.
    """
    prompt_ids, completion_ids, own, messages, *_, images, returned = generated
    images = [[*(of_row or ())] for of_row in images or [()] * len(own)]
    fields = process_images(processor, images) if any(returned) and processor is not None else {}
    if "image_grid_thw" in fields:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        lengths = fields["image_grid_thw"].prod(-1) // getattr(processor.image_processor, "merge_size", 2) ** 2
        refuse_mismatch(rows, ids, images, lengths, image_token)
    return Turns(own, images, returned, fields, messages)


def refuse_mismatch(
    rows: Sequence[Mapping[str, Any]],
    ids: Sequence[Sequence[int]],
    images: ImagesOfRows,
    lengths: torch.Tensor,
    image_token: int | None,
) -> None:
    """Raise `DataError` if the image tokens of a row do not match its images.

    TRL 1.16 would train on all rows of the process without their images (`has_mismatch` in grpo_trainer.py).

    Args:
        rows: rows of the data.
        ids: tokens of each prompt and its completion.
        images: images of each row.
        lengths: tokens of each image, row by row, (images,).
        image_token: placeholder token of images.
    """
    wanted = iter(lengths.tolist())
    for row, tokens, of_row in zip(rows, ids, images, strict=True):
        takes, count = sum(next(wanted) for _ in of_row), [*tokens].count(image_token or -1)
        if count != takes:
            found = f"{count} image tokens with its completion, but its {len(of_row)} images take {takes}"
            cure = "use a chat template that writes the images of tool messages"
            raise DataError(f"The {describe_row(row)} has {found}: {cure}.")


TURN_COLUMNS = ("num_turns", "num_tool_calls", "num_returned_images")


def count_turns(completions: Sequence[Any], turns: Turns) -> dict[str, list[int]]:
    """Count the policy's messages, the tools' messages and the tools' images, as the reward columns `TURN_COLUMNS`."""
    roles = [[message["role"] for message in completion] for completion in completions]
    counts = ([each.count("assistant") for each in roles], [each.count("tool") for each in roles])
    return dict(zip(TURN_COLUMNS, (*counts, [*map(len, turns.returned)]), strict=True))


@dataclass(frozen=True)
class ToolGuard:
    """Turns results of tools into text and images that the model can read, and failures into errors.

    TRL shows the text of an error to the policy and counts it in `tools/failure_frequency`.

    Attributes:
        special: matches the special tokens of the tokenizer; None if there are none.
        process: image processor of the model; None for a text model.
    """

    special: re.Pattern[str] | None
    process: Callable[..., Any] | None

    def clean(self, text: str) -> str:
        """Replace special tokens by spaces and lone surrogates by `?`."""
        text = text.encode("utf-8", "replace").decode()
        return text if self.special is None else self.special.sub(" ", text)

    def wrap(self, tool: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool, synchronous or not."""

        async def call_async(**arguments: Any) -> Any:
            with self._naming_failure(tool):
                return self._read_result(await tool(**arguments))

        def call(**arguments: Any) -> Any:
            with self._naming_failure(tool):
                return self._read_result(tool(**arguments))

        return call_async if inspect.iscoroutinefunction(tool) else call

    @contextmanager
    def _naming_failure(self, tool: Callable[..., Any]) -> Iterator[None]:
        try:
            yield
        except SystemExit as error:  # would end training, or the event loop of asynchronous tools
            raise DataError(f"The tool {tool.__name__} called sys.exit({error.code!r}).") from error
        except Exception as error:
            raise DataError(self.clean(error_text(error, 1000))) from error

    def _read_result(self, result: Any) -> list[dict[str, Any]] | str:
        parts = [self._read_part(part) for part in result] if isinstance(result, list) else []
        return [part for part in parts if part] if parts and all(parts) else self.clean(str(result))

    def _read_part(self, part: Any) -> dict[str, Any] | None:
        """Return a part of type `text` or `image`; None for other types."""
        kind = part.get("type", "image" if "image" in part else "text") if isinstance(part, dict) else None
        if kind == "image":
            return {"type": "image", "image": self._read_image(part.get("image"))}
        return {"type": "text", "text": self.clean(str(part["text"]))} if kind == "text" and "text" in part else None

    def _read_image(self, given: Any) -> Image.Image:
        """Return an image that the model can read; paths and addresses are refused, never opened."""
        if not isinstance(given, bytes | Image.Image):
            raise DataError(f"The tool returned an image of type {type(given).__name__}: return Pillow's, or bytes.")
        image = read_image(given)
        if self.process is not None:
            self.process(images=[image], return_tensors="pt")
        return image
