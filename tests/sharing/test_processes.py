import torch
import torch.distributed as dist
from support.launching import join_group, results_of
from support.models.compare import checkpointed, gradients, largest_relative, scored, with_head
from support.models.families import build, make_batch, with_frozen_tower
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.vision import VisionCache


def all_agree(mine: bool) -> bool:
    votes = torch.tensor(int(mine))
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)


def whole(values):
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def compare(model, batch, **options):
    plain = whole(gradients(model, batch))
    with share_prompts(model, batch.completion_length, **options) as report:
        shared = whole(gradients(model, batch))
    return largest_relative(plain, shared), report


def difference_with_images_once(rank, model, batch) -> float:
    """Against a pass that computes its images; one of the processes has computed them before, the other has not."""
    cache = VisionCache(base_of(causal_model(model)), 64)
    plain = gradients(model, batch)
    with cache.around(model):
        if rank:
            with torch.no_grad():
                causal_model(model)(**batch.inputs)
        cache.metrics()
        difference = largest_relative(plain, gradients(model, batch))
    computed = cache.metrics()["vision/computed_per_image"]
    assert computed == 0 if rank else computed > 0, computed
    return difference


def run() -> None:
    torch.set_num_threads(1)
    join_group()
    rank = dist.get_rank()
    mine = make_batch("qwen2_5_vl", seed=rank, images=(1, 2 - rank))
    alone = make_batch("qwen2_5_vl", seed=9, generations=1)

    model = torch.nn.parallel.DistributedDataParallel(with_head(build("qwen2_5_vl")).train())
    difference, report = compare(model, mine)
    assert difference < 1e-5, difference
    assert report.prompts_per_row == 1 / 3, report
    difference, report = compare(model, alone if rank else mine)  # the processes make different passes, DDP allows it
    assert difference < 1e-5, difference
    assert bool(report.plain) == bool(rank), report

    model = torch.nn.parallel.DistributedDataParallel(with_head(with_frozen_tower(build("qwen2_5_vl"))).train())
    assert difference_with_images_once(rank, model, mine) < 1e-5

    for checkpointing in (False, True):
        model = with_head(build("qwen2_5_vl")).train()
        if checkpointing:
            checkpointed(model)
        mesh = init_device_mesh("cpu", (2,))
        for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for other in (mine, alone):
            difference, report = compare(model, other if rank else mine, agree=all_agree)
            assert difference < 1e-5, difference
            assert report.prompts_per_row == (1 if rank and other is alone else 1 / 3), report

    model = with_head(build("qwen3")).train()
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    text = make_batch("qwen3", seed=rank)
    expected = gradients(model, text)
    with share_prompts(model, text.completion_length, agree=all_agree) as report:
        with torch.no_grad():
            shared, _ = scored(model, text)
        found = gradients(model, text)
    assert report.prompts_per_row == 1 / 3, report
    assert all(torch.allclose(expected[name], each, rtol=1e-4, atol=1e-5) for name, each in found.items())
    with torch.no_grad():
        plain, _ = scored(model, text)
    assert (plain - shared).abs().max() < 4e-6


def test_gradients_are_the_same():
    results_of(run, processes=2)
