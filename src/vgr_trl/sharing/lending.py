"""Lend the keys and values of a prompt to all micro-batches of an optimizer step: it runs forward and backward once.

The first micro-batch that holds a prompt runs it with gradients. Completions read detached copies of its keys and
values, which collect their gradients over the micro-batches. The last reader reads them through `_RunPrompt`, whose
backward pass runs that of the prompt. So the prompt runs backward once, within an ordinary backward pass, and the loops
of Trainer and accelerate stay as they are. At the micro-batch that synchronises gradients every prompt is closed,
whatever was planned; with several processes it is closed through `AddCollected`, since DDP takes each weight's gradient
once.

`shuffle_whole_groups` brings the completions of a prompt together, and `find_read_again` says which prompts are lent.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any
from weakref import ref

import torch
from accelerate import state
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vgr_trl.pixels import IMAGE_INPUTS, clone_to, on_device
from vgr_trl.sharing.model_support import attention_modules
from vgr_trl.sharing.prefix_cache import StoredKeys, WrittenPrefix, require
from vgr_trl.sharing.prefix_forward import PER_TOKEN, Prefill, PrefixSplit, find_groups, first_rows
from vgr_trl.utils import VGRError


class AddCollected(torch.autograd.Function):
    """The identity, whose backward pass adds the gradient that a detached copy has collected."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, copy: Tensor) -> Tensor:
        """Return `live`, of any shape."""
        ctx.copy = copy
        return live.view_as(live)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of `live`."""
        collected = ctx.copy.grad
        return grad if collected is None else grad + collected, None


class _RunPrompt(torch.autograd.Function):
    """The identity of all copies of a prompt; its backward pass, which comes last, is that of the live tensors.

    In one graph with the completions, the weights' gradients of both would be added before they are accumulated: those
    of the completions would wait for those of the prompt, in as much memory again as the weights have.
    """

    @staticmethod
    def forward(ctx: Any, live: Sequence[Tensor], *copies: Tensor) -> tuple[Tensor, ...]:
        ctx.live, ctx.copies = live, copies
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        pairs = zip(ctx.copies, grads, strict=True)
        torch.autograd.backward(ctx.live, [grad if copy.grad is None else grad + copy.grad for copy, grad in pairs])
        return (None,) * (1 + len(grads))


class _Reach(torch.autograd.Function):
    """The identity, whose backward pass also reaches other tensors, with gradients of 0."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.zeros = [other.new_zeros(()).expand_as(other) for other in others]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *ctx.zeros)


class LentPrompt:
    """A prompt that has run forward, and waits for the gradients of its keys and values.

    Args:
        tokens: (P - 1,) without padding.
        pixels: its pixel inputs.
        prefill: of this prompt alone.

    Attributes:
        live: keys and values of each layer, (1, H, P - 1, D), with their graph.
        copies: detached; they require gradients where the live ones do.

    Raises:
        UnsupportedModel: a layer keeps other state than keys and values.
    """

    def __init__(self, tokens: tuple[int, ...], pixels: list[Tensor], prefill: Prefill) -> None:
        self.tokens, self.pixels, self.prefill = tokens, pixels, prefill
        layers = prefill.written.layers
        require(all(type(layer) is StoredKeys for layer in layers), "layers that keep other state than keys and values")
        self.live: list[Tensor] = [each for layer in layers for each in (layer.keys, layer.values)]
        self.copies = [each.detach().requires_grad_(each.requires_grad) for each in self.live]

    def close(self) -> list[Tensor]:
        """Return keys and values whose backward pass runs that of the prompt, with what the copies have collected."""
        if _exchanges_gradients():
            pairs = zip(self.live, self.copies, strict=True)
            return [AddCollected.apply(live, copy) if live.requires_grad else live for live, copy in pairs]
        trained = [number for number, live in enumerate(self.live) if live.requires_grad]
        read = list(self.copies)
        if trained:
            outputs = _RunPrompt.apply([self.live[each] for each in trained], *[read[each] for each in trained])
            for number, output in zip(trained, outputs, strict=True):
                read[number] = output
        return read


class Lending:
    """The open prompts of an optimizer step.

    Args:
        base: base model, whose weights must not change while a prompt is open.

    Attributes:
        open: prompts that have run forward and not yet backward.
    """

    def __init__(self, base: nn.Module) -> None:
        self.open: list[LentPrompt] = []
        self._base = ref(base)
        self._guard: Any = None

    def find(self, tokens: tuple[int, ...], pixels: Sequence[Tensor]) -> LentPrompt | None:
        """Return the open prompt with these tokens and pixels."""
        for prompt in self.open:
            if prompt.tokens == tokens and all(map(torch.equal, prompt.pixels, pixels)):
                return prompt
        return None

    def add(self, prompt: LentPrompt) -> None:
        """Open a prompt; an optimizer step before it is closed is an error."""
        self.open.append(prompt)
        self._guard = self._guard or register_optimizer_step_pre_hook(self._refuse_open)

    def read(self, prompt: LentPrompt, *, again: bool) -> list[Tensor]:
        """Return the keys and values that a micro-batch reads; close the prompt unless another one reads it again."""
        if again:
            return prompt.copies
        self.open.remove(prompt)
        self._release_guard()
        return prompt.close()

    def close_all(self, hidden: Tensor) -> Tensor:
        """Return hidden states whose backward pass runs all open prompts backward too."""
        live = [each for prompt in self.open for each in prompt.close() if each.requires_grad]
        self.clear()
        return _Reach.apply(hidden, *live) if live else hidden

    def forget_abandoned(self) -> None:
        """Forget prompts of a step that was given up, whose gradients `zero_grad` has removed from the weights alone.

        A micro-batch that has run backward leaves a gradient in the decoder's attention, where that trains.
        """
        if not any(copy.grad is not None for prompt in self.open for copy in prompt.copies):
            return
        decoder = [module for module in attention_modules(self._base() or nn.Module()) if module.is_causal]
        trained = [weight for module in decoder for weight in module.parameters() if weight.requires_grad]
        if trained and all(weight.grad is None for weight in trained):
            self.clear()

    def _release_guard(self) -> None:
        if self._guard is not None and not self.open:
            self._guard.remove()
            self._guard = None

    def clear(self) -> None:
        """Forget the prompts of a step that has been interrupted."""
        self.open.clear()
        self._release_guard()

    def _refuse_open(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        base = self._base()
        mine = set() if base is None else set(map(id, base.parameters()))
        if not any(id(weight) in mine for group in optimizer.param_groups for weight in group["params"]):
            return
        count = len(self.open)
        self.clear()
        lost = f"{count} prompts have run forward and not backward before an optimizer step, and lost their gradients"
        raise VGRError(f"{lost}: accumulate gradients with accelerate, or switch share_prompts off.")


def is_last_micro_batch() -> bool:
    """Return whether accelerate synchronises gradients, and the optimizer steps, after this micro-batch."""
    return bool(GradientState().sync_gradients)


def _exchanges_gradients() -> bool:
    """Whether processes exchange gradients after this micro-batch; vLLM beside a trainer makes a group of one, too."""
    alone = state.is_initialized() and state.AcceleratorState().distributed_type == state.DistributedType.NO
    return is_initialized() and not alone and is_last_micro_batch()


class MicroBatch:
    """The U prompts of a micro-batch that reads open prompts, or opens some for later ones.

    Args:
        lending: the open prompts of the optimizer step.
        inputs: of the pass, by name.
        split: of the batch.
        again: (N,) whether a later micro-batch reads the prompt of a row; None: any may, but for the last.

    Attributes:
        found: (U,) open prompts; None where a prompt has to run.
        again: (U,) whether a later micro-batch reads the prompt.
        computed: the number of prompts that run in this pass.
    """

    def __init__(
        self, lending: Lending, inputs: Mapping[str, Any], split: PrefixSplit, again: Sequence[bool] | None
    ) -> None:
        self.lending, self.inputs, self.split = lending, inputs, split
        self.rows = first_rows(split.groups)
        ids, mask = (inputs[name][self.rows, : split.start] for name in ("input_ids", "attention_mask"))
        columns = ids.masked_fill(mask == 0, -1).tolist()
        self.tokens = [tuple(token for token in row if token >= 0) for row in columns]
        self.pixels = [[inputs[name][parts[row]] for name, parts in split.pixels.items()] for row in self.rows]
        self.found = [lending.find(*each) for each in zip(self.tokens, self.pixels, strict=True)]
        self.computed = self.found.count(None)
        self.again = [False] * split.prompts
        for group, of_row in zip(split.groups, again or [True] * len(split.groups), strict=True):
            self.again[group] |= of_row and not is_last_micro_batch()

    @property
    def lends(self) -> bool:
        """Whether a prompt is open, or read again."""
        return any(self.again) or self.computed < len(self.found)

    def prefill(self, base: Any, plain: Callable[..., Any]) -> Prefill:
        """Return the prompts as if they had run in this pass; run those that are not open.

        Args:
            base, plain: as `Prefill` takes them.
        """
        for number, prompt in enumerate(self.found):
            if prompt is None:
                self.found[number] = opened = self._run(number, base, plain)
                self.lending.add(opened)
        prompts = [prompt for prompt in self.found if prompt is not None]
        read = [self.lending.read(prompt, again=again) for prompt, again in zip(prompts, self.again, strict=True)]
        joined = copy(prompts[0].prefill)
        joined.written = WrittenPrefix(base.config, self.split.groups)
        tensors = iter([_left_padded(same, self.split.start) for same in zip(*read, strict=True)])
        for layer in joined.written.layers:
            layer.update(next(tensors), next(tensors))
        if hasattr(base, "rope_deltas"):
            deltas, device = [prompt.prefill.deltas for prompt in prompts], self.inputs["input_ids"].device
            none = torch.zeros(1, 1, dtype=torch.long, device=device)
            joined.deltas = torch.cat([none if each is None else each.to(device) for each in deltas])
        joined.split, joined.hidden, joined.skips_padding = self.split, None, True
        return joined

    def _run(self, number: int, base: Any, plain: Callable[..., Any]) -> LentPrompt:
        """Run one prompt, without its padding."""
        row, tokens = self.rows[number], self.tokens[number]
        alone = {name: value for name, value in self.inputs.items() if name not in (*PER_TOKEN, *self.split.pixels)}
        columns = slice(self.split.start - len(tokens), self.split.start)
        for name in PER_TOKEN:
            if self.inputs.get(name) is not None:
                alone[name] = self.inputs[name][row : row + 1, columns]
        alone |= dict(zip(self.split.pixels, self.pixels[number], strict=True))
        pixels = {name: [slice(None)] for name in self.split.pixels}
        split = PrefixSplit(len(tokens), len(tokens) + 1, [0], pixels)
        return LentPrompt(tokens, self.pixels[number], Prefill(base, plain, alone, split, wants_hidden=False))


def _left_padded(tensors: Sequence[Tensor], width: int) -> Tensor:
    """(U, H, width, D) of U times (1, H, P - 1, D); a single one that is as wide is not copied."""
    if len(tensors) == 1 and tensors[0].size(-2) == width:
        return tensors[0]
    return torch.cat([torch.nn.functional.pad(each, (0, 0, width - each.size(-2), 0)) for each in tensors])


PROMPT_GROUP, READ_AGAIN = "prompt_group", "prompt_read_again"  # columns of TRL's training batches


def find_read_again(groups: Sequence[int], runs: Sequence[bool], batch_size: int, window: int) -> list[bool]:
    """Return for each row whether a later micro-batch of its optimizer step reads its prompt.

    Args:
        groups: (N,) number of the prompt of each row, in the order of the micro-batches.
        runs: (N,) whether the row has a loss; others do not run.
        batch_size: rows of a micro-batch.
        window: rows of an optimizer step.
    """
    again = [False] * len(groups)
    later: set[int] = set()
    for start in reversed(range(0, len(groups), batch_size)):
        rows = range(start, min(start + batch_size, len(groups)))
        if rows.stop % window == 0:
            later = set()
        for row in rows:
            again[row] = groups[row] in later
        later |= {groups[row] for row in rows if runs[row]}
    return again


def sort_by_group(permutation: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The permutation with the rows of a group brought together where the group's first row stands, order kept."""
    position: dict[int, int] = {}
    for row in permutation:
        position.setdefault(groups[row], len(position))
    return sorted(permutation, key=lambda row: position[groups[row]])


def shuffle_whole_groups(
    batch: dict[str, Any],
    arrange: Callable[[Sequence[int], Sequence[int]], list[int]] = sort_by_group,
    is_image: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """TRL's `shuffle_sequence_dict` for a generation batch, with the completions of a prompt kept together.

    Draws the same random numbers. A value with no entry per row (a number, None) is kept. Pixel inputs that TRL has cut
    into rows are one object for all rows of a group, and keep no other memory. `PROMPT_GROUP` is added: the number of
    each row's prompt.

    Args:
        batch: `prompt_ids` and `prompt_mask` (N, P), and tensors or lists with one entry per row.
        arrange: returns another permutation, given a random one and the number of the group of each row.
        is_image: returns which tokens stand for images, where completions may hold some; None: only prompts do.
    """
    pixels = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    by_row = list(zip(*pixels.values(), strict=True)) if pixels else None
    groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], by_row)
    batch = batch | {name: _share_pixels(each, groups) for name, each in pixels.items() if isinstance(each, list)}
    if is_image is not None and isinstance(pixels.get("image_grid_thw"), list):
        groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], _pixels_of_prompts(batch, is_image))
    batch[PROMPT_GROUP] = groups
    order = arrange(torch.randperm(len(groups)).tolist(), groups)

    def reordered(value: Any) -> Any:
        if value is None or (isinstance(value, Tensor) and value.ndim == 0):
            return value
        if isinstance(value, Tensor):
            return value[on_device(order, value.device)]
        return [value[row] for row in order]

    return {key: reordered(value) for key, value in batch.items()}


def _pixels_of_prompts(batch: Mapping[str, Any], is_image: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
    """Return patches and grids of the prompt of each row, whose images stand in front of those of its completion."""
    before, behind = (is_image(batch[name]).sum(1).tolist() for name in ("prompt_ids", "completion_ids"))  # (N,) each
    found = []
    for values, grids, own, others in zip(batch["pixel_values"], batch["image_grid_thw"], before, behind, strict=True):
        patches = len(values) * own // max(own + others, 1)
        found.append([values[:patches], grids[grids.prod(-1).cumsum(0) <= patches]])
    return found


def _share_pixels(values: Sequence[Tensor], groups: Sequence[int]) -> list[Tensor]:
    kept = [clone_to(values[row], values[row].device) for row in first_rows(groups)]
    return [kept[group] for group in groups]
