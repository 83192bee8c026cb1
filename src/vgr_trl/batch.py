"""`Batch`: completions behind their prompts, with images and columns; batches are built, taken, trimmed, joined."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from vgr_trl.errors import DataError
from vgr_trl.pixels import (
    PERTURBED,
    TOKEN_TYPES,
    RowImages,
    causal_type,
    fingerprint,
    image_tensors,
    missing_column_error,
    on_device,
)

VIEWS = "signals.views."  # prefix of the names of perturbations and of views of rows
EXTRA = "signals.extra."  # prefix of the names of named signals (N, T)
LAYERED = ("signals.attention.vision", "signals.attention.instruction", "signals.attention.region")  # (N, L, T)
# Columns by their token axis: P tokens of the prompt, padded on the left, T tokens of the completion, padded on the
# right, or both.
_PROMPT_COLUMNS = {"prompt_ids", "prompt_mask"}
_COMPLETION_COLUMNS = {
    *("completion_ids", "completion_mask", "by_policy", "engine_ratio", "reference_hidden"),
    *("old_logps", "reference_logps", "engine_logps", "teacher_logps", "teacher_top_logps", "teacher_top_ids"),
    *("token_advantages", "values", "returns"),
}
_MAY_BE_SINGLE = "engine_ratio"  # (N, T), or (N, 1) with one value per row
_PAD_VALUES = {"by_policy": 1.0, _MAY_BE_SINGLE: 1.0}  # other columns: 0, ids: the tokenizer's
_MISSING = {"by_policy": 1.0, **dict.fromkeys(TOKEN_TYPES, 0.0)}  # values for rows from a batch without the column


def token_axes(name: str) -> tuple[bool, bool]:
    """Return whether the last dimension of a column runs over prompt tokens, and whether over completion tokens."""
    is_signal = name.startswith("signals.") and ".num_" not in name
    of_completion = name in _COMPLETION_COLUMNS or is_signal
    return name in _PROMPT_COLUMNS or name in TOKEN_TYPES, of_completion or name in TOKEN_TYPES


def per_token(advantages: Tensor) -> Tensor:
    """Return advantages (N,) as (N, 1); a critic's advantages are (N, T) already."""
    return advantages.unsqueeze(1) if advantages.ndim == 1 else advantages


@dataclass(eq=False)  # tensors do not compare to a bool
class Batch:
    """N completions of T tokens behind prompts of P tokens.

    Attributes:
        prompt_ids: (N, P), padded on the left.
        prompt_mask: (N, P), 0 for padding.
        completion_ids: (N, T), padded on the right.
        completion_mask: (N, T), 0 for padding, and for all tokens of a completion that does not count.
        images: images of each row.
        by_policy: (N, T), 1 for the policy's tokens and 0 for the tokens of tools; None: all are the policy's.
        old_logps: (N, T), log-probabilities under the policy that sampled; None: unknown.
        advantages: (N,) or (N, T); None: unknown.
        num_items: number of valid tokens of the rollout over all processes; None: unknown.
        columns: further values by name: tensors and lists with an entry per row, token types (N, P + T) among them, and
            numbers of the whole batch; `token_axes` knows their tokens.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    images: RowImages = field(default_factory=RowImages)
    by_policy: Tensor | None = None
    old_logps: Tensor | None = None
    advantages: Tensor | None = None
    num_items: Tensor | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def width(self) -> int:
        """P."""
        return self.prompt_ids.size(1)

    @property
    def length(self) -> int:
        """T."""
        return self.completion_ids.size(1)

    @property
    def valid(self) -> Tensor:
        """Tokens that count in the loss, (N, T) bool."""
        mask = self.completion_mask.bool()
        return mask if self.by_policy is None else mask & self.by_policy.bool()

    @property
    def unwritten(self) -> Tensor:
        """Tokens that the policy has not written, (N, P + T) bool: prompts and the tokens of tools."""
        return torch.cat([self.prompt_mask.bool(), self.completion_mask.bool() & ~self.valid], dim=1)

    @property
    def ids(self) -> Tensor:
        """Tokens of prompts and completions, (N, P + T)."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def has_images(self) -> Tensor:
        """Whether each row has an image, (N,) bool."""
        return torch.tensor(self.images.num_images or [0] * len(self)) > 0

    @property
    def token_types(self) -> dict[str, Tensor]:
        """Types of all tokens, (N, P + T), by the name that a model takes."""
        return {name: self.columns[name] for name in TOKEN_TYPES if name in self.columns}

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """Arguments of a model's pass over whole rows, (N, P + T)."""
        mask = torch.cat([self.prompt_mask, self.completion_mask], dim=1)
        pixels = {name: value for name, value in self.images.tensors.items() if name != PERTURBED}
        return {"input_ids": self.ids, "attention_mask": mask, **self.token_types, **pixels}

    @property
    def tokens(self) -> "Batch":
        """The tokens of prompts and completions alone."""
        return Batch(self.prompt_ids, self.prompt_mask, self.completion_ids, self.completion_mask)

    @property
    def to_score(self) -> "Batch":
        """The columns that a forward pass reads: tokens, `by_policy`, token types and images."""
        images = self.images.without(PERTURBED)
        return replace(self.tokens, images=images, by_policy=self.by_policy, columns=self.token_types)

    @property
    def all_columns(self) -> dict[str, Any]:
        """All values by name, but for the images."""
        named_fields = {name: value for name in _FIELDS if (value := vars(self)[name]) is not None}
        return named_fields | self.columns

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any], images: RowImages) -> "Batch":
        """Build a batch from values by name; None stands for an unknown value."""
        further = {name: value for name, value in columns.items() if value is not None}
        named_fields = {name: further.pop(name) for name in _FIELDS if name in further}
        return cls(**named_fields, images=images, columns=further)

    def with_columns(self, **columns: Any) -> "Batch":
        """Return the batch with added or replaced values by name; None removes a value."""
        return Batch.of_columns(self.all_columns | columns, self.images)

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return the rows with these numbers, in this order; consecutive rows are not copied.

        Raises:
            DataError: images or a column cannot be assigned to rows.
        """
        if list(rows) == list(range(len(self))):
            return self
        for name, value in self.columns.items():
            if is_of_rows(value) and len(value) != len(self):
                cure = f"give a tensor or a list with an entry for each of {len(self)} rows, or a number"
                raise DataError(f"The batch has {name}, which cannot be assigned to its rows: {cure}.")
        return Batch.of_columns(take_entries(self.all_columns, rows), self.images.take(rows))

    def trim(self, width: int, length: int) -> "Batch":
        """Trim the rows to the last `width` tokens of the prompt and the first `length` tokens of the completion."""
        columns = self.all_columns
        for name, value in columns.items():
            prompt, completion = token_axes(name)
            if (prompt or completion) and value.size(-1) == prompt * self.width + completion * self.length:
                columns[name] = value[..., prompt * (self.width - width) : prompt * self.width + completion * length]
        return self.with_columns(**columns)

    def map(self, change: Callable[[Any], Any], key: Callable[[Any], Hashable] | None = None) -> "Batch":
        """Change every tensor, and the images' tensors by `RowImages.map`."""
        columns = self.all_columns.items()
        changed = {name: change(value) if isinstance(value, Tensor) else value for name, value in columns}
        return Batch.of_columns(changed, self.images.map(change, key))

    def stored(self) -> "Batch":
        """Copy the rows to the CPU, equal image inputs once; no other batch is kept in memory."""
        return self.map(lambda value: value.detach().to("cpu", copy=True), fingerprint)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; shared image inputs count once."""
        inputs = {id(value): value for row in self.images.rows for value in row.values()}
        columns = [value for value in self.all_columns.values() if isinstance(value, Tensor)]
        return sum(value.nbytes for value in [*columns, *inputs.values()])


_FIELDS = [column.name for column in fields(Batch) if column.name not in ("images", "columns")]


def is_of_rows(value: object) -> bool:
    """Whether a value of a batch has an entry per row."""
    return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim > 0)


def take_entries(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Take some entries of each tensor and list; numbers, texts and None stay. Consecutive entries are not copied.

    Args:
        columns: values by name.
        rows: numbers of the entries, at least one.
    """
    block = slice(rows[0], rows[0] + len(rows))
    consecutive = list(rows) == list(range(block.start, block.stop))
    taken = dict(columns)
    for name, value in columns.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            taken[name] = value[block if consecutive else on_device(rows, value.device)]
        elif is_of_rows(value):
            taken[name] = [value[row] for row in rows]
    return taken


def join_batches(parts: Sequence[Batch], *, pad_token_id: int, pad_to_multiple_of: int | None = None) -> Batch:
    """Join the rows of batches, padded to the longest prompt and the longest completion.

    The first part, the batch to train on, decides about columns that not all parts have: columns that it lacks are
    filled in from `_MISSING`, or dropped, because the loss does not read them.

    Args:
        parts: at least one part; the result is on the device of the first, and has its numbers.
        pad_token_id: pads tokens.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a part lacks a column of the first part, without a value in `_MISSING`.
    """
    multiple, device, joined = pad_to_multiple_of or 1, parts[0].prompt_ids.device, dict[str, Any]()
    if len(parts) == 1 and parts[0].width % multiple == parts[0].length % multiple == 0:
        return parts[0]
    longest = max(part.width for part in parts), max(part.length for part in parts)
    width, length = (count + -count % multiple for count in longest)
    columns = [part.all_columns for part in parts]
    for name in [*columns[0], *(name for name in _MISSING if name not in columns[0])]:
        values = [part.get(name) for part in columns]
        if is_of_rows(next((value for value in values if value is not None), None)):
            values = _pad_column(name, values, parts, width, length, pad_token_id)
            is_tensor = isinstance(values[0], Tensor)
            moved = [value.to(device, values[0].dtype) for value in values] if is_tensor else values
            joined[name] = torch.cat(moved) if is_tensor else [*chain(*moved)]
        else:
            joined[name] = values[0]
    images = RowImages.join([part.images for part in parts], [*map(len, parts)])
    return Batch.of_columns(joined, images.map(lambda value: value.to(device)))


def _pad_column(
    name: str, columns: Sequence[Any], parts: Sequence[Batch], width: int, length: int, pad_token_id: int
) -> list[Any]:
    """Return a column of each part, None without it, padded to P and T if it has the tokens."""
    prompt, completion = token_axes(name)
    present = [value for value in columns if value is not None]
    if len(present) < len(parts) and name not in _MISSING:
        raise missing_column_error(name)
    if not (prompt or completion) or (name == _MAY_BE_SINGLE and all(value.size(-1) == 1 for value in present)):
        return present
    undefined = float("nan") if name.startswith((VIEWS, EXTRA)) else 0
    padding = pad_token_id if name in ("prompt_ids", "completion_ids") else _PAD_VALUES.get(name, undefined)
    values = []
    for part, value in zip(parts, columns, strict=True):
        span = prompt * part.width + completion * part.length
        if value is None:
            value = present[0].new_full((len(part), 1), _MISSING[name])
        value = value if value.size(-1) == span else value.expand(len(part), span)
        values.append(pad(value, (prompt * (width - part.width), completion * (length - part.length)), value=padding))
    return values


def make_completions_causal(batch: Batch, config: Any) -> Batch:
    """Return a batch with causal token types in the completions, if the model's `config` asks for others than 0.

    TRL pads token types with 0, by which completions of PaliGemma attend to later tokens.
    """
    types = batch.columns.get("token_type_ids")  # (N, P + T)
    if types is None or not (kind := causal_type(config, "token_type_ids")):
        return batch
    completions = types.new_full(batch.completion_ids.shape, kind)
    return batch.with_columns(token_type_ids=torch.cat([types[:, : batch.width], completions], dim=1))


ImagesOfRows = Sequence[Sequence[Image.Image]]


@dataclass
class Prompts:
    """Prompts that N completions are sampled from.

    Attributes:
        ids: tokens of each row's prompt, image tokens included.
        images: images of each row; None if no row has images.
        fields: outputs of the processor beside the tokens.
    """

    ids: Sequence[Sequence[int]]
    images: ImagesOfRows | None
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Turns:
    """Turns of N completions that may call tools: the policy's tokens, and the images of prompts and tools.

    Attributes:
        by_policy: lists of 1 for the policy's tokens and 0 for the tokens of tools, one list per completion.
        images: images of each row, the prompt's first.
        returned: images of each row that tools returned.
        fields: pixel inputs of all images; empty if no tool returned an image: the prompts' inputs are complete.
        messages: messages of each completion, for records only.
    """

    by_policy: Sequence[Sequence[int]]
    images: ImagesOfRows
    returned: ImagesOfRows
    fields: Mapping[str, Tensor]
    messages: Sequence[Any] = ()


def build_batch(
    prompts: Prompts,
    completion_ids: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    vision_token_ids: Sequence[int] = (),
    valid: Sequence[bool] | None = None,
    by_policy: Sequence[Sequence[int]] | None = None,
    pad_to_multiple_of: int | None = None,
) -> Batch:
    """Build a batch on the CPU.

    Args:
        prompts: prompts, with the images and pixel inputs of completions whose tools returned images.
        completion_ids: tokens of each completion.
        pad_token_id: pads tokens.
        vision_token_ids: placeholder tokens of images, which give the tiles of each row.
        valid: whether the tokens of each row count; None: all count.
        by_policy: lists of 1 for the policy's tokens and 0 for the tokens of tools; None without tools.
        pad_to_multiple_of: P and T become multiples of it.
    """
    prompt_ids, prompt_mask = pad_rows(prompts.ids, pad_token_id, "left", pad_to_multiple_of)
    completions, completion_mask = pad_rows(completion_ids, pad_token_id, "right", pad_to_multiple_of)
    if valid is not None:
        completion_mask = completion_mask * torch.tensor(valid).unsqueeze(1)
    batch = Batch(prompt_ids, prompt_mask, completions, completion_mask)
    if by_policy is not None:
        batch.by_policy, _ = pad_rows(by_policy, 1, "right", pad_to_multiple_of)
    if prompts.images is None:
        return batch
    for name in prompts.fields.keys() & TOKEN_TYPES:
        types, _ = pad_rows(prompts.fields[name], 0, "left", pad_to_multiple_of)
        batch.columns[name] = pad(types, (batch.width - types.size(1), batch.length))
    is_image = torch.isin(batch.ids, torch.tensor(vision_token_ids))  # (N, P + T)
    is_image[:, batch.width :] &= (torch.ones(1) if batch.by_policy is None else batch.by_policy) == 0
    counts = [len(images or ()) for images in prompts.images]
    batch.images = RowImages.count(image_tensors(prompts.fields), is_image, counts)
    return batch


def pad_rows(
    rows: Sequence[Sequence[int]], value: int, side: Literal["left", "right"], multiple: int | None = None
) -> tuple[Tensor, Tensor]:
    """Pad rows of tokens; return tokens and their mask, (N, S) each.

    Args:
        rows: tokens of each row.
        value: pads tokens.
        side: side of the padding.
        multiple: S becomes a multiple of it.
    """
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = []
    for tokens, padding in ((ids, value), ([torch.ones_like(row) for row in ids], 0)):
        equal = pad_sequence(tokens, batch_first=True, padding_value=padding, padding_side=side)
        missing = -equal.size(1) % (multiple or 1)
        padded.append(pad(equal, (missing, 0) if side == "left" else (0, missing), value=padding))
    return padded[0], padded[1]


@dataclass(frozen=True)
class Placement:
    """Placement of the completions of a rollout batch on the processes.

    The rows of all processes in order are the completions of all prompts in order. A group is spread over several
    processes if their number of rows is no multiple of G.

    Attributes:
        rows: completions on each process, N.
        num_generations: completions per prompt, G.
        process_index: this process.
        num_processes: number of processes with `rows` completions each.
    """

    rows: int
    num_generations: int
    process_index: int = 0
    num_processes: int = 1

    @property
    def num_groups(self) -> int:
        """Groups on all processes together."""
        return self.rows * self.num_processes // self.num_generations

    def holders(self, group: int) -> range:
        """Return the processes with completions of `group`."""
        first = group * self.num_generations
        return range(first // self.rows, (first + self.num_generations - 1) // self.rows + 1)

    def here(self, group: int) -> list[tuple[int, int]]:
        """Return the completions of `group` on this process, as pairs of local row and index in the group."""
        offset = group * self.num_generations - self.process_index * self.rows
        return [(offset + index, index) for index in range(self.num_generations) if 0 <= offset + index < self.rows]

    def holder(self, group: int) -> int:
        """Return the process that stores the whole `group`: the process with its first completion."""
        return self.holders(group)[0]
