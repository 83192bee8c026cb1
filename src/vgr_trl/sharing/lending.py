"""Lend the keys and values of a prompt to all micro-batches of an optimizer step, so that it runs once.

The first micro-batch with a prompt runs it forward with gradients. Completions read detached copies of its keys and
values, which accumulate gradients over the micro-batches. The last reader closes the prompt: it reads through
`_RunPrompt`, whose backward pass runs the prompt's backward pass. So the prompt runs backward once, within an ordinary
backward pass, and the loops of Trainer and accelerate stay as they are. A pass that closes a prompt may never run
backward. The prompt stays open until one does, and another pass closes it again. The micro-batch that synchronises
gradients closes every prompt. With several processes the graphs of prompt and pass are then one, as DDP accepts each
gradient once.

`shuffle_whole_groups` brings the completions of a prompt together, and `find_read_again` tells which prompts to lend.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from accelerate.state import DistributedType, GradientState
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vgr_trl.errors import VGRError
from vgr_trl.pixels import IMAGE_INPUTS, take_entries
from vgr_trl.sharing.exactness import why_padding_counts
from vgr_trl.sharing.model_support import distributed_type, has_rope_deltas, has_sharded_parameters
from vgr_trl.sharing.prefix_cache import StoredKeys, WrittenPrefix
from vgr_trl.sharing.prefix_forward import Prefill
from vgr_trl.sharing.prefix_split import PER_TOKEN, PrefixSplit, find_groups, first_rows


class _RunPrompt(torch.autograd.Function):
    """Identity of a closed prompt's keys and values, whose backward pass runs the prompt's backward pass.

    For detached copies it starts a backward pass of its own. In one graph, autograd would hold the completions'
    gradients of all weights until it can add the prompt's, in as much memory as the weights. For live tensors it is
    part of the prompt's backward pass.
    """

    @staticmethod
    def forward(ctx: Any, prompt: "LentPrompt", *read: Tensor) -> tuple[Tensor, ...]:
        ctx.prompt, ctx.is_live = prompt, read[0].grad_fn is not None
        return tuple(each.view_as(each) for each in read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.prompt.run_backward(grads, ctx.is_live))


class _Reach(torch.autograd.Function):
    """Identity whose backward pass also reaches other tensors, with gradients of 0."""

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
        tokens: (P - 1,) tokens without padding.
        pixels: pixel inputs of the prompt.
        prefill: of this prompt alone.
        lending: open prompts, which contain this prompt until it has run backward.

    Attributes:
        copies: detached keys and values of each layer, (1, H, P - 1, D); in trained layers they accumulate gradients.
        is_closed: whether the present pass has closed the prompt.
    """

    def __init__(self, tokens: tuple[int, ...], pixels: list[Tensor], prefill: Prefill, lending: "Lending") -> None:
        self.tokens, self.pixels, self.prefill, self.lending = tokens, pixels, prefill, lending
        live: list[Tensor] = [each for layer in prefill.written.layers for each in (layer.keys, layer.values)]
        self.copies = [each.detach().requires_grad_(each.requires_grad) for each in live]
        self.is_closed, self._readers = False, 0  # passes that closed the prompt and have not run backward
        self._trained = [pair for pair in zip(live, self.copies, strict=True) if pair[0].requires_grad]
        prompt = ref(self)  # no cycle that would wait for Python's garbage collector
        for _, each in self._trained:
            each.register_post_accumulate_grad_hook(lambda _: lending.watch(prompt()))

    def close(self) -> list[Tensor]:
        """Return keys and values whose backward pass runs the prompt backward, with the gradients of the copies."""
        self.is_closed, self._readers = True, self._readers + 1
        if not self._trained:
            self.lending.finish(self)
            return self.copies
        read = iter(_RunPrompt.apply(self, *[pair[not _exchanges_gradients()] for pair in self._trained]))
        return [next(read) if each.requires_grad else each for each in self.copies]

    def run_backward(self, grads: Sequence[Tensor], is_live: bool) -> Sequence[Tensor | None]:
        """Run the prompt backward with the gradients of a reader and of the copies.

        Args:
            grads: gradients of the reader's keys and values.
            is_live: whether the reader's graph contains the prompt's graph.

        Returns:
            Gradients of the live tensors; None for copies.
        """
        self._readers -= 1  # another reader may run the graph again
        pairs = zip(self._trained, grads, strict=True)
        whole = [grad if each.grad is None else grad + each.grad for (_, each), grad in pairs]
        if not is_live:
            torch.autograd.backward([live for live, _ in self._trained], whole, retain_graph=self._readers > 0)
        for _, each in self._trained:
            each.grad = None
        self.lending.finish(self)
        return whole if is_live else [None] * len(whole)

    @cached_property
    def weight(self) -> Any:
        """A trained weight on which the prompt's keys and values depend; None: there is none."""
        nodes: list[Any] = [live.grad_fn for live, _ in reversed(self._trained)]
        weights, seen = self.lending.weights(), {None}
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                if id(leaf := getattr(node, "variable", None)) in weights:
                    return leaf
                nodes.extend(other for other, _ in node.next_functions)
        return None


class Lending:
    """The open prompts of an optimizer step.

    Args:
        base: base model, whose weights must not change while a prompt is open.

    Attributes:
        open: prompts that have run forward but not yet backward.
    """

    def __init__(self, base: nn.Module) -> None:
        self.open: list[LentPrompt] = []
        self._base = ref(base)
        self._hooks: list[Any] = []
        self._watched: Any = None  # a weight whose gradient shows whether `zero_grad` was called
        self._version = 0  # version of this gradient after its last accumulation

    def weights(self) -> set[int]:
        """Return the ids of the base model's weights."""
        base = self._base()
        return set() if base is None else set(map(id, base.parameters()))

    def find(self, tokens: tuple[int, ...], pixels: Sequence[Tensor]) -> LentPrompt | None:
        """Return the open prompt with these tokens and pixels."""
        same = (each for each in self.open if each.tokens == tokens and all(map(torch.equal, each.pixels, pixels)))
        return next(same, None)

    def add(self, prompt: LentPrompt) -> LentPrompt:
        """Open a prompt and return it; an optimizer step while it is open raises an error."""
        self.open.append(prompt)
        self._hooks = self._hooks or [register_optimizer_step_pre_hook(self._refuse_open)]
        return prompt

    def close_all(self, hidden: Tensor) -> Tensor:
        """Close the remaining prompts; return hidden states, (N, S, D), whose backward pass runs them backward."""
        others = [prompt for prompt in self.open if not prompt.is_closed]
        live = [each for prompt in others for each in prompt.close() if each.requires_grad]
        return _Reach.apply(hidden, *live) if live else hidden

    def watch(self, prompt: LentPrompt | None) -> None:
        """Watch a weight's gradient from the first gradient of a copy until no prompt is open."""
        if self._watched is None and prompt in self.open and prompt is not None and prompt.weight is not None:
            self._watched = prompt.weight
            if self._watched.grad is None:  # as the prompt has not run backward
                self._watched.grad = torch.zeros_like(self._watched)
            self._hooks.append(self._watched.register_post_accumulate_grad_hook(self._keep_version))
            self._keep_version(self._watched)

    def _keep_version(self, weight: Any) -> None:
        self._version = weight.grad._version

    def begin_pass(self) -> None:
        """Mark all open prompts as not closed; forget the prompts of a step abandoned by `zero_grad`."""
        for prompt in self.open:
            prompt.is_closed = False
        if self._watched is not None:
            grad = self._watched.grad
            if grad is None or (grad._version != self._version and not grad.any()):
                self.clear()

    def finish(self, prompt: LentPrompt) -> None:
        """Forget a prompt that has run backward."""
        self.open = [other for other in self.open if other is not prompt]
        if not self.open:
            self.clear()

    def clear(self) -> None:
        """Forget the prompts of an interrupted step."""
        self.open.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watched = [], None

    def _refuse_open(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        mine = self.weights()
        if not any(id(weight) in mine for group in optimizer.param_groups for weight in group["params"]):
            return
        count = len(self.open)
        self.clear()
        lost = f"{count} prompts ran forward but not backward before an optimizer step, and lost their gradients"
        raise VGRError(f"{lost}: accumulate gradients with accelerate, or switch share_prompts off.")


def is_last_micro_batch() -> bool:
    """Return whether this micro-batch is the last of its optimizer step, after which gradients are synchronised."""
    return bool(GradientState().sync_gradients)


def _exchanges_gradients() -> bool:
    """Whether processes exchange gradients after this micro-batch; vLLM makes a group of a single process, too."""
    return is_initialized() and distributed_type() != DistributedType.NO and is_last_micro_batch()


class MicroBatch:
    """The U prompts of a micro-batch that reads open prompts, or opens prompts for later micro-batches.

    Args:
        lending: open prompts of the optimizer step.
        inputs: of the pass, by name.
        split: of the batch.
        again: (N,) whether a later micro-batch reads the prompt of a row; None: unknown, so it may.

    Attributes:
        found: (U,) open prompts; None where a prompt has to run.
        again: (U,) whether a later micro-batch reads the prompt.
        computed: number of prompts that run in this pass.
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
        """Whether the micro-batch reads an open prompt, or opens a prompt for a later micro-batch."""
        return any(self.again) or self.computed < len(self.found)

    def prefill(self, base: Any, plain: Callable[..., Any]) -> Prefill:
        """Run the prompts that are not open; return all prompts as if they had run in this pass.

        Args:
            base: base model (without head) of a transformers model.
            plain: its forward pass.
        """
        prompts = [prompt or self._open(number, base, plain) for number, prompt in enumerate(self.found)]
        read = [each.copies if again else each.close() for each, again in zip(prompts, self.again, strict=True)]
        joined = copy(prompts[0].prefill)
        joined.written = WrittenPrefix(base.config, self.split.groups)
        tensors = iter([_pad_left(same, self.split.start) for same in zip(*read, strict=True)])
        for layer in joined.written.layers:
            layer.update(next(tensors), next(tensors))
        if has_rope_deltas(base):
            deltas, device = [prompt.prefill.deltas for prompt in prompts], self.inputs["input_ids"].device
            none = torch.zeros(1, 1, dtype=torch.long, device=device)
            joined.deltas = torch.cat([none if each is None else each.to(device) for each in deltas])
        joined.split, joined.hidden, joined.skips_padding = self.split, None, True
        return joined

    def _open(self, number: int, base: Any, plain: Callable[..., Any]) -> LentPrompt:
        """Run and open a single prompt, without its padding."""
        row, tokens = self.rows[number], self.tokens[number]
        alone = {name: value for name, value in self.inputs.items() if name not in (*PER_TOKEN, *self.split.pixels)}
        columns = slice(self.split.start - len(tokens), self.split.start)
        given = [name for name in PER_TOKEN if self.inputs.get(name) is not None]
        alone |= {name: self.inputs[name][row : row + 1, columns] for name in given}
        alone |= dict(zip(self.split.pixels, self.pixels[number], strict=True))
        pixels = {name: [slice(None)] for name in self.split.pixels}
        split = PrefixSplit(len(tokens), len(tokens) + 1, [0], pixels)
        prefill = Prefill(base, plain, alone, split, wants_hidden=False)
        return self.lending.add(LentPrompt(tokens, self.pixels[number], prefill, self.lending))


def _pad_left(tensors: Sequence[Tensor], width: int) -> Tensor:
    """Pad U tensors (1, H, P - 1, D) on the left to (U, H, width, D); a single tensor of this width is not copied."""
    if len(tensors) == 1 and tensors[0].size(-2) == width:
        return tensors[0]
    return torch.cat([torch.nn.functional.pad(each, (0, 0, width - each.size(-2), 0)) for each in tensors])


PROMPT_GROUP, READ_AGAIN = "prompt_group", "prompt_read_again"  # columns added to TRL's training batches


def find_read_again(groups: Sequence[int], runs: Sequence[bool], batch_size: int, window: int) -> list[bool]:
    """Return for each row whether a later micro-batch of its optimizer step reads its prompt.

    Args:
        groups: (N,) number of the prompt of each row, in the order of the micro-batches.
        runs: (N,) whether the row has a loss; rows without a loss do not run.
        batch_size: number of rows of a micro-batch.
        window: number of rows of an optimizer step.
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
    """Move the rows of each group to the place of its first row in a permutation, in the same order.

    Args:
        permutation: (N,) rows.
        groups: (N,) number of the group of each row.
    """
    found = dict.fromkeys(groups[row] for row in permutation)
    position = {group: place for place, group in enumerate(found)}
    return sorted(permutation, key=lambda row: position[groups[row]])


def shuffle_whole_groups(
    batch: dict[str, Any],
    arrange: Callable[[Sequence[int], Sequence[int]], list[int]] = sort_by_group,
    is_image: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """Shuffle a generation batch as TRL's `shuffle_sequence_dict` does, but keep the completions of a prompt together.

    Draws the same random numbers as TRL. Values without an entry per row (numbers, None) are kept. Pixel inputs that
    TRL has cut into rows become one object per group. `PROMPT_GROUP` is added, the number of each row's prompt.

    Args:
        batch: `prompt_ids` and `prompt_mask` (N, P), and tensors or lists with one entry per row.
        arrange: returns a permutation, given a random permutation and the number of the group of each row.
        is_image: returns which tokens are image placeholders, where completions may hold images; None: only prompts
            hold images.
    """
    pixels = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    by_row = list(zip(*pixels.values(), strict=True)) if pixels else None
    groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], by_row)
    batch = batch | {name: _share_pixels(each, groups) for name, each in pixels.items() if isinstance(each, list)}
    if is_image is not None and isinstance(pixels.get("image_grid_thw"), list):
        groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], _select_prompt_pixels(batch, is_image))
    batch[PROMPT_GROUP] = groups
    order = arrange(torch.randperm(len(groups)).tolist(), groups)
    return take_entries(batch, order)


def _select_prompt_pixels(batch: Mapping[str, Any], is_image: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
    """Return patches and grids of each row's prompt, whose images precede the images of its completion."""
    before, behind = (is_image(batch[name]).sum(1).tolist() for name in ("prompt_ids", "completion_ids"))  # (N,) each
    found = []
    for values, grids, own, others in zip(batch["pixel_values"], batch["image_grid_thw"], before, behind, strict=True):
        patches = len(values) * own // max(own + others, 1)
        found.append([values[:patches], grids[grids.prod(-1).cumsum(0) <= patches]])
    return found


def _share_pixels(values: Sequence[Tensor], groups: Sequence[int]) -> list[Tensor]:
    kept = [values[row].detach().clone() for row in first_rows(groups)]
    return [kept[group] for group in groups]


def why_not_lend(base: Any) -> str | None:
    """Return why prompts of a base model cannot be lent to several micro-batches; None: they can."""
    kind = distributed_type()
    if kind == DistributedType.DEEPSPEED:
        return "DeepSpeed"
    if kind == DistributedType.FSDP or has_sharded_parameters(base):
        return "sharded parameters"
    if not all(type(layer) is StoredKeys for layer in WrittenPrefix(base.config, []).layers):
        return "layers with other state than keys and values"
    return why_padding_counts(base)
