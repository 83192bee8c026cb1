"""The four processes of `test_spread.py`: python spread_worker.py FOLDER, results with torch.save.

The first works alone, then the first two together, the first three, and all four.
"""

import multiprocessing
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from batches import PAD, draw_batch, draw_signals

from vgr_trl import sampling
from vgr_trl.patches import let_gloo_finish
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


class Team:
    """The processes that work together, and how often they have gathered objects."""

    def __init__(self, world):
        self.group, self.world, self.calls = dist.new_group(list(range(world))), world, 0

    def gather_object(self, objects):
        """Concatenate a list of each process, as accelerate's function of this name does."""
        self.calls += 1
        parts = [None] * self.world
        dist.all_gather_object(parts, objects, group=self.group)
        return [item for part in parts for item in part]

    def gather(self, count):
        """Return the counts of all processes."""
        counts = [torch.zeros_like(count) for _ in range(self.world)]
        dist.all_gather(counts, count, group=self.group)
        return torch.stack(counts)


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


def run(rank, world, team, resume_at):
    """Train on nothing for a few steps: replace dead groups, then store the live ones. Return what each step had."""
    before = team.calls
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
        batch = correct_num_items(batch, team.gather)
        entered = [buffer.add(group) for group in completed.values()]
        if step == resume_at:
            states = team.gather_object([buffer.state_dict()])
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
                "calls": team.calls - before,
            }
        )
    return history


def exchanged(rank, world, team):
    """Groups that another round generated, which take other places than they had there: their log-probabilities."""
    whole, advantages, rewards = whole_batch(0)
    batch, signals = local_part(whole, rank, world)
    placement = Placement(GROUP * GROUPS // world, GROUP, rank, world)
    made = groups_from_batch(
        {name: value for name, value in batch.items() if name != "old_per_token_logps"}, range(GROUPS), placement,
        advantages=advantages, rewards=rewards, pad_token_id=PAD, signals=signals,
    )  # fmt: skip
    places = {(group + 1) % GROUPS: found for group, found in enumerate(made)}
    rows = torch.arange(rank * placement.rows, (rank + 1) * placement.rows)
    completed = with_old_logps(places, -rows.float().unsqueeze(1).expand(-1, 9), placement)
    columns = {place: found.rows.columns for place, found in completed.items() if found.rows is not None}
    return {
        place: of_rows["old_per_token_logps"][:, 0].tolist()
        for place, of_rows in columns.items()
        if "old_per_token_logps" in of_rows
    }


def work(rank, folder):
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    for world in (1, 2, 3, 4):
        team = Team(world)
        sampling.gather_object = team.gather_object
        if rank < world:
            results = [*(run(rank, world, team, resume_at) for resume_at in (None, 2)), exchanged(rank, world, team)]
            torch.save(results, folder / f"{world}-{rank}.pt")
    dist.barrier()
    let_gloo_finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    forked = multiprocessing.get_context("fork")  # imports once for all four
    processes = [forked.Process(target=work, args=(rank, Path(sys.argv[1]))) for rank in range(4)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.05)
    sys.exit(max(abs(process.exitcode) for process in processes))
