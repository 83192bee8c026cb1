"""The images of the table of completions, gathered by all processes or by none.

TRL gathers them where the rows of a process have images, so rows with images on one process and without on another end
in a hang or an abort (grpo_trainer of TRL 1.16, `log_multimodal`); and where only some batches have images, those of a
table stand beside the wrong completions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from trl import GRPOTrainer

from vgr_trl.data.rows.columns import images_of
from vgr_trl.replacing import replaced


@contextmanager
def images_logged_by_all(trainer: GRPOTrainer, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Log the images of these rows in place of TRL, which is about to log the completions; all processes call this.

    Runs with tools keep TRL's way, which knows the images that tools return.
    """
    if not trainer.log_multimodal or trainer.tools or trainer.environment_factories:
        yield
        return
    with replaced(trainer, "log_multimodal", False):
        yield
    gathered = gather_object([images_of(row) or _in_messages(row.get("prompt")) for row in rows])
    logged: Any = trainer._logs["images"]
    if any(gathered) or logged:
        without = len(trainer._logs["prompt"]) - len(gathered) - len(logged)
        logged.extend([[] for _ in range(without)])
        logged.extend(gathered)


def _in_messages(prompt: Any) -> list[Any]:
    messages = prompt if isinstance(prompt, list) else []
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None]
