"""Groups that are spread over real processes: the same batches as with one process, row by row."""

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from batches import PAD, draw_batch, draw_signals
from support.launching import results_of

from vgr_trl.sampling import (
    Placement,
    ReplayBuffer,
    correct_num_items,
    groups_from_batch,
    insert_groups,
    merge_states,
    split_state,
    with_old_logps,
    zero_variance_groups,
)
from vgr_trl.signals.named import columns_of_signals, signals_of_columns

GROUP, GROUPS, STEPS = 4, 3, 8
DEAD = {1: [1], 3: [1], 4: [2], 5: [0, 1], 6: [0, 2], 7: [0, 1, 2]}  # by step


def whole_batch(step):
    """Twelve rows of three prompts, with signals and rewards; the groups in DEAD are."""
    batch = draw_batch(step, [1, 2, 0], group=GROUP, family="qwen", prompts=4 + step, completions=9 - step)
    rewards = torch.randint(0, 4, (GROUP * GROUPS,), generator=torch.Generator().manual_seed(step)).float()
    for group in DEAD.get(step, []):
        rewards[GROUP * group : GROUP * (group + 1)] = 1
    advantages = (rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)).flatten()
    batch["advantages"] = advantages
    batch["signals"] = draw_signals(step, batch)
    return batch, advantages, rewards


def local_part(batch, rank, world):
    """The rows of one process, cut with TRL's functions; its padding is what its own rows need."""
    rows = GROUP * GROUPS // world
    here = slice(rank * rows, (rank + 1) * rows)
    images = {"pixel_values", "image_grid_thw", "signals", "num_items_in_batch"}
    columns = {name: value for name, value in batch.items() if name not in images}
    columns |= columns_of_signals(batch["signals"])
    part = {name: value[here] for name, value in columns.items()}
    taken = signals_of_columns(part)
    part["pixel_values"] = torch.cat(pixels_of_rows(batch)[here])
    first = sum(batch["num_images"][: here.start])
    part["image_grid_thw"] = batch["image_grid_thw"][first : first + sum(part["num_images"])]
    prompt, completion = (int(part[f"{name}_mask"].sum(1).max()) for name in ("prompt", "completion"))
    start = part["prompt_ids"].size(1) - prompt
    for name in ("prompt_ids", "prompt_mask"):
        part[name] = part[name][:, start:]
    for name in ("completion_ids", "completion_mask", "old_per_token_logps"):
        part[name] = part[name][:, :completion]
    part["mm_token_type_ids"] = part["mm_token_type_ids"][:, start:][:, : prompt + completion]
    for name in ("logps", "entropies", "mask", "dependency"):
        setattr(taken, name, getattr(taken, name)[:, :completion])
    for name in ("vision", "instruction", "mask"):
        setattr(taken.attention, name, getattr(taken.attention, name)[..., :completion])
    if not sum(part["num_images"]):  # TRL makes a batch of text where no local row has an image
        for name in ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids"):
            del part[name]
    return {name: value for name, value in part.items() if not name.startswith("signals.")}, taken


def pixels_of_rows(batch):
    """The patches of each row; none where all are text."""
    if "pixel_values" not in batch:
        return [torch.empty(0, 6)] * len(batch["prompt_ids"])
    patches = iter(batch["image_grid_thw"].prod(-1).tolist())
    counts = [sum(next(patches) for _ in range(images)) for images in batch["num_images"]]
    return list(batch["pixel_values"].split(counts))


def rows_of(batch, signals):
    """What each row has, without padding, as lists."""
    pixels = pixels_of_rows(batch)
    rows = []
    for row, (prompt, completion) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
        valid = completion == 1
        rows.append(
            {
                "prompt": batch["prompt_ids"][row][prompt == 1].tolist(),
                "completion": batch["completion_ids"][row][valid].tolist(),
                "old": batch["old_per_token_logps"][row][valid].tolist(),
                "advantage": batch["advantages"][row].item(),
                "pixels": pixels[row].flatten().tolist(),
                "logps": signals.logps[row, : len(valid)][valid].tolist(),
                "attention": signals.attention.vision[:, row, : len(valid)][:, valid].tolist(),
            }
        )
    return rows


def run(state, resume_at):
    """Train on nothing for a few steps: replace dead groups, then store the live ones. Return what each step had."""
    rank, world = state.process_index, state.num_processes
    buffer = ReplayBuffer(6, seed=1, max_age=4)
    history = []
    for step in range(STEPS):
        whole, advantages, rewards = whole_batch(step)
        batch, signals = local_part(whole, rank, world)
        placement = Placement(GROUP * GROUPS // world, GROUP, rank, world)
        buffer.advance(step)
        dead = zero_variance_groups(advantages, rewards, GROUP)
        chosen = dict(zip(dead, buffer.sample(len(dead)), strict=False))
        live = [group for group in range(GROUPS) if group not in dead]
        stored = groups_from_batch(
            {name: value for name, value in batch.items() if name != "old_per_token_logps"}, live, placement,
            advantages=advantages, rewards=rewards, pad_token_id=PAD, step=step, signals=signals,
        )  # fmt: skip
        old = batch["old_per_token_logps"]
        completed = with_old_logps(dict(zip(live, stored, strict=True)), old, placement)
        batch, signals = insert_groups(batch, chosen, placement, pad_token_id=PAD, signals=signals)
        batch = correct_num_items(batch, lambda count: gather(count.unsqueeze(0)))
        entered = [buffer.add(group) for group in completed.values()]
        if step == resume_at:
            states = gather_object([buffer.state_dict()])
            buffer = ReplayBuffer(6, seed=9, max_age=4)
            buffer.load_state_dict(split_state(merge_states(states), rank, world))
        history.append(
            {
                "rows": rows_of(batch, signals),
                "tokens": int(batch["num_items_in_batch"]),
                "replaced": list(chosen),
                "entered": entered,
                "size": len(buffer),
                "megabytes": buffer.megabytes,
                "age": buffer.mean_age,
            }
        )
    return history


def histories():
    """Without an interruption, and with one after step 2."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    return [run(state, resume_at) for resume_at in (None, 2)]


@pytest.fixture(scope="module")
def alone():
    return results_of(histories, processes=1)[0][0]


@pytest.mark.parametrize(
    "world", [3, pytest.param(4, marks=pytest.mark.minutes)]
)  # whole groups in each process, and three rows of groups of four
def test_several_processes_train_on_what_one_trains_on(alone, world):
    assert [step["replaced"] for step in alone] == [[], [1], [], [1], [2], [0, 1], [0, 2], [0, 1, 2]]
    assert any(not all(step["entered"]) for step in alone), "the buffer has been full"
    for together in zip(*results_of(histories, processes=world), strict=True):
        for step, expected in enumerate(alone):
            parts = [history[step] for history in together]
            assert [row for part in parts for row in part["rows"]] == expected["rows"]
            for part in parts:
                for name in ("tokens", "replaced", "entered", "size", "age"):
                    assert part[name] == expected[name], name
            # a part without images has no token types
            assert sum(part["megabytes"] for part in parts) == pytest.approx(expected["megabytes"], rel=0.1)
