"""Turn the results of tools into text and images that a model can read, and their failures into errors."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vgr_trl.data.images import read_image
from vgr_trl.errors import DataError, error_text


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
