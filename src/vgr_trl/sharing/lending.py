"""Lend the keys and values of a prompt to all micro-batches of an optimizer step: it runs forward and backward once.

The first micro-batch that holds a prompt runs it with gradients. Completions read detached copies of its keys and
values, which collect their gradients over the micro-batches. The last reader reads them through `_RunPrompt`, whose
backward pass runs that of the prompt. So the prompt runs backward once, within an ordinary backward pass, and the loops
of Trainer and accelerate stay as they are. A pass that closes a prompt may never run backward: until then the prompt is
open, and another pass closes it again. At the micro-batch that synchronises gradients every prompt is closed, whatever
was planned; with several processes its graph is then one with that of the pass, as DDP takes each gradient once.

`shuffle_whole_groups` brings the completions of a prompt together, and `find_read_again` says which prompts are lent.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from accelerate import state
from accelerate.state import DistributedType, GradientState
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vgr_trl.errors import VGRError
from vgr_trl.pixels import IMAGE_INPUTS, clone_to, on_device
from vgr_trl.sharing.exactness import why_padding_counts
from vgr_trl.sharing.model_support import has_sharded_parameters
from vgr_trl.sharing.prefix_cache import StoredKeys, WrittenPrefix
from vgr_trl.sharing.prefix_forward import Prefill
from vgr_trl.sharing.prefix_split import PER_TOKEN, PrefixSplit, find_groups, first_rows
from vgr_trl.sharing.report import require


class _RunPrompt(torch.autograd.Function):
    """The identity of keys and values that the pass reads which closes a prompt.

    Of copies the backward pass runs that of the prompt, and comes last. In one graph with the completions, the weights'
    gradients of both would be added before they are accumulated: those of the completions would wait for those of the
    prompt, in as much memory again as the weights have. Of live tensors it is part of the prompt's.
    """

    @staticmethod
    def forward(ctx: Any, prompt: "LentPrompt", *read: Tensor) -> tuple[Tensor, ...]:
        ctx.prompt, ctx.is_live = prompt, read[0].grad_fn is not None
        return tuple(each.view_as(each) for each in read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.prompt.run_backward(grads, ctx.is_live))


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
        lending: the open prompts, of which this is one until it has run backward.

    Attributes:
        copies: keys and values of each layer, (1, H, P - 1, D), detached; trained layers' collect gradients.
        is_closed: whether the present pass has closed it.

    Raises:
        UnsupportedModel: a layer keeps other state than keys and values.
    """

    def __init__(self, tokens: tuple[int, ...], pixels: list[Tensor], prefill: Prefill, lending: "Lending") -> None:
        self.tokens, self.pixels, self.prefill, self.lending = tokens, pixels, prefill, lending
        layers = prefill.written.layers
        require(all(type(layer) is StoredKeys for layer in layers), "layers that keep other state than keys and values")
        live: list[Tensor] = [each for layer in layers for each in (layer.keys, layer.values)]
        self.copies = [each.detach().requires_grad_(each.requires_grad) for each in live]
        self.is_closed, self._readers = False, 0  # that have closed it, and not run backward
        self._trained = [pair for pair in zip(live, self.copies, strict=True) if pair[0].requires_grad]
        prompt = ref(self)  # its memory does not wait for Python's collector
        for _, each in self._trained:
            each.register_post_accumulate_grad_hook(lambda _: lending.watch(prompt()))

    def close(self) -> list[Tensor]:
        """Return keys and values whose backward pass runs that of the prompt, with what the copies have collected."""
        self.is_closed, self._readers = True, self._readers + 1
        if not self._trained:
            self.lending.finish(self)
            return self.copies
        read = iter(_RunPrompt.apply(self, *[pair[not _exchanges_gradients()] for pair in self._trained]))
        return [next(read) if each.requires_grad else each for each in self.copies]

    def run_backward(self, grads: Sequence[Tensor], is_live: bool) -> Sequence[Tensor | None]:
        """Run the prompt backward with the gradients of a reader and of the copies; return gradients of live tensors.

        Args:
            grads: of the reader's keys and values.
            is_live: whether the graph of the reader goes on with that of the prompt.
        """
        self._readers -= 1  # another one, unless it never runs backward, runs the graph again
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
        """A trained weight that the prompt's keys and values depend on; None: there is none."""
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
        open: prompts that have run forward and not yet backward.
    """

    def __init__(self, base: nn.Module) -> None:
        self.open: list[LentPrompt] = []
        self._base = ref(base)
        self._hooks: list[Any] = []
        self._watched: Any = None  # a weight whose gradient tells of `zero_grad`
        self._version = 0  # of this gradient, when it was last added to

    def weights(self) -> set[int]:
        """Return the ids of the base model's weights."""
        base = self._base()
        return set() if base is None else set(map(id, base.parameters()))

    def find(self, tokens: tuple[int, ...], pixels: Sequence[Tensor]) -> LentPrompt | None:
        """Return the open prompt with these tokens and pixels."""
        same = (each for each in self.open if each.tokens == tokens and all(map(torch.equal, each.pixels, pixels)))
        return next(same, None)

    def add(self, prompt: LentPrompt) -> None:
        """Open a prompt; an optimizer step before it has run backward is an error."""
        self.open.append(prompt)
        self._hooks = self._hooks or [register_optimizer_step_pre_hook(self._refuse_open)]

    def close_all(self, hidden: Tensor) -> Tensor:
        """Return hidden states whose backward pass runs all prompts backward that this pass has not closed."""
        others = [prompt for prompt in self.open if not prompt.is_closed]
        live = [each for prompt in others for each in prompt.close() if each.requires_grad]
        return _Reach.apply(hidden, *live) if live else hidden

    def watch(self, prompt: LentPrompt | None) -> None:
        """Watch a weight's gradient, from when a copy has one until no prompt is open."""
        if self._watched is None and prompt in self.open and prompt is not None and prompt.weight is not None:
            self._watched = prompt.weight
            if self._watched.grad is None:  # until the prompt runs backward
                self._watched.grad = torch.zeros_like(self._watched)
            self._hooks.append(self._watched.register_post_accumulate_grad_hook(self._keep_version))
            self._keep_version(self._watched)

    def _keep_version(self, weight: Any) -> None:
        self._version = weight.grad._version

    def begin_pass(self) -> None:
        """Let the pass close all open prompts; forget prompts of a step abandoned by `zero_grad`."""
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
        """Forget the prompts of a step that has been interrupted."""
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
        read = [each.copies if again else each.close() for each, again in zip(prompts, self.again, strict=True)]
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
        prefill = Prefill(base, plain, alone, split, wants_hidden=False)
        return LentPrompt(tokens, self.pixels[number], prefill, self.lending)


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


def why_not_lend(base: Any) -> str | None:
    """Return why prompts of a base model are not lent to several micro-batches; None: they can be."""
    kind = state.AcceleratorState().distributed_type if state.is_initialized() else None
    if kind == DistributedType.DEEPSPEED:
        return "DeepSpeed"
    if kind == DistributedType.FSDP or has_sharded_parameters(base):
        return "sharded parameters"
    if not all(type(layer) is StoredKeys for layer in WrittenPrefix(base.config, []).layers):
        return "layers that keep other state than keys and values"
    return why_padding_counts(base)
