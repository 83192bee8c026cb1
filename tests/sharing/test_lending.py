from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from support.launching import join_group, results_of
from support.models.compare import checkpointed, largest_relative, needs_shared, scored, with_head
from support.models.families import FAMILIES, Batch, build, make_batch
from torch import nn

from vgr_trl.errors import VGRError
from vgr_trl.pixels import image_inputs_of, parts_by_tokens
from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.lending import Lending
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.sharing.prefix_split import is_image_token

ONE_BY_ONE = [[row] for row in range(6)]
LENDS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "llava_next", "idefics3", "llama", "mistral")


def case(name, **more):
    images = (1, 2) if FAMILIES[name].picture else (0, 0)
    model, batch = with_head(build(name)).double().train(), make_batch(name, **{"images": images, **more})
    batch.inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch.inputs.items()}
    needs_shared(model)
    return model, batch


def rows_of(model, batch, rows):
    given = image_inputs_of(batch.inputs)
    is_image = is_image_token(batch.inputs["input_ids"], causal_model(model).config)
    parts = parts_by_tokens(given, is_image) if given else {}
    padding = int((batch.inputs["attention_mask"][rows] == 0).int().cumprod(1).sum(1).min())
    chosen = {name: value[rows][:, padding:] for name, value in batch.inputs.items() if name not in parts}
    pixels = {name: torch.cat([given[name][parts[name][row]] for row in rows]) for name in parts}
    chosen |= {name: value for name, value in pixels.items() if len(value)}
    return Batch(chosen, batch.completion_length, batch.prompts)


def accumulated(model, batch, micro_batches, *, synchronises=True, around=lambda rows: nullcontext(), to_none=True):
    """The gradients of a loss with another weight for every token, accumulated as TRL and accelerate do."""
    model.zero_grad(set_to_none=to_none)
    weights = torch.randn(6, batch.completion_length, generator=torch.Generator().manual_seed(5)).double()
    for rows in micro_batches:
        last = synchronises and rows is micro_batches[-1]
        GradientState()._set_sync_gradients(last)
        with around(rows), nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            (scored(model, rows_of(model, batch, rows))[0] * weights[rows]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "micro_batches", "more"),
    [
        *((name, ONE_BY_ONE, {}) for name in LENDS),
        ("qwen2_5_vl", [[0, 1], [2, 3], [4, 5]], {}),  # the second holds parts of two groups
        ("gemma3", [[0, 1], [2, 3], [4, 5]], {}),
        ("llama", [[0, 4], [1, 3], [2, 5]], {}),  # as TRL shuffles them
        ("qwen2_5_vl", [[0, 1, 2], [3], [4, 5]], {}),
        *((name, ONE_BY_ONE, {"returned": (0, 1, 2)}) for name in ("qwen2_5_vl", "qwen3_vl")),
        ("qwen2_5_vl", ONE_BY_ONE, {"returned": (0, 1, 2), "images": (0, 1)}),
        ("qwen2_5_vl", ONE_BY_ONE, {"images": (1, 1), "text": (30, 30)}),
        *(
            ("qwen2_5_vl", ONE_BY_ONE, {"trained": part})
            for part in ("visual", "layers.0.self_attn.o_proj", "layers.1")
        ),
    ],
)
def test_gradients(name, micro_batches, more):
    """Each prompt runs once, and the gradients are those of plain passes.

    `returned`: images behind the prompt in each completion. `text`: both prompts have the same words about another
    image. Completions of a frozen decoder leave a gradient in no weight: the step is not one that was given up.
    """
    trained = more.get("trained", "")
    model, batch = case(name, **{key: value for key, value in more.items() if key != "trained"})
    if "text" in more:
        batch.inputs["input_ids"][3:, :-12] = batch.inputs["input_ids"][:3, :-12]
    for parameter, value in model.named_parameters():
        value.requires_grad_(trained in parameter)
    plain = accumulated(model, batch, micro_batches)
    if trained == "layers.1":
        checkpointed(model)
    with share_prompts(model) as report:
        shared = accumulated(model, batch, micro_batches)
    assert (report.prompts, report.rows, report.plain) == (2, 6, {})
    assert plain.keys() == shared.keys()
    assert largest_relative(plain, shared) < 1e-6


def planned(model, batch, open_prompts):
    """Sharing of each micro-batch of one row by itself, with a plan: rows 2 and 5 are the last of their groups."""
    lending = Lending(base_of(causal_model(model)))

    @contextmanager
    def around(rows):
        again = [row not in (2, 5) for row in rows]
        with share_prompts(model, batch.completion_length, lending=lending, again=again) as report:
            yield
        assert report.plain == {}
        open_prompts.append(len(lending.open))

    return around


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("looked_at", [[], [2], [5], [2, 4, 5]])
@pytest.mark.parametrize("plans", [False, True])
def test_a_pass_that_never_runs_backward_takes_no_gradient(plans, looked_at, exchanges, monkeypatch):
    """A micro-batch passes twice, and the second pass alone runs backward; rows 2 and 5 close their prompts."""
    monkeypatch.setattr("vgr_trl.sharing.lending._exchanges_gradients", lambda: exchanges)
    model, batch = case("qwen2_5_vl")
    plain, around = accumulated(model, batch, ONE_BY_ONE), planned(model, batch, [])

    @contextmanager
    def twice(rows):
        with around(rows) if plans else nullcontext():
            if rows[0] in looked_at:
                scored(model, rows_of(model, batch, rows))
            yield

    with nullcontext() if plans else share_prompts(model):
        shared = accumulated(model, batch, ONE_BY_ONE, around=twice)
    assert largest_relative(plain, shared) < 1e-6


def test_a_prompt_whose_last_reader_is_skipped_waits_for_the_last_micro_batch():
    """Memory runs out in the pass of row 2, which was to close its prompt; no optimizer steps before it is closed."""
    model, batch = case("qwen2_5_vl")
    micro_batches = [[0], [1], [3], [4], [5]]
    plain, lending = accumulated(model, batch, micro_batches), Lending(base_of(causal_model(model)))

    @contextmanager
    def around(rows):
        with share_prompts(model, batch.completion_length, lending=lending, again=[row not in (2, 5) for row in rows]):
            if rows == [3]:
                scored(model, rows_of(model, batch, [2]))  # its backward pass never runs
            yield

    shared = accumulated(model, batch, micro_batches, around=around)
    assert lending.open == []
    assert largest_relative(plain, shared) < 1e-6


def run(finds_unused):
    """Two processes: with a plan where DDP looks for unused parameters, else everything closes in the last micro-batch.

    The last micro-batch of a process reads a prompt that ran in an earlier one, so it does not run the vision tower.
    """
    torch.set_num_threads(1)
    join_group()
    rank = dist.get_rank()
    model, batch = case("qwen2_5_vl", seed=rank)
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=finds_unused)
    plain = accumulated(parallel, batch, ONE_BY_ONE)
    if finds_unused:
        shared = accumulated(parallel, batch, ONE_BY_ONE, around=planned(parallel, batch, []))
    else:
        with share_prompts(parallel) as report:
            shared = accumulated(parallel, batch, ONE_BY_ONE)
        assert report.prompts == 2
    return largest_relative(plain, shared), shared


@pytest.mark.parametrize("finds_unused", [True, False])
def test_two_processes(finds_unused):
    (difference, mine), (other_difference, others) = results_of(run, finds_unused, processes=2)
    assert max(difference, other_difference) < 1e-6
    assert all(torch.equal(mine[name], others[name]) for name in others)


def test_an_optimizer_step_with_an_open_prompt_is_refused():
    """Of this model only; and nothing is left of a block that ended with an error."""
    model, batch = case("llama")
    other = nn.Linear(1, 1)
    other.weight.grad = torch.ones(1, 1)
    with share_prompts(model):
        accumulated(model, batch, ONE_BY_ONE, synchronises=False)
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        with pytest.raises(VGRError, match="2 prompts ran forward but not backward"):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # refused once
    with suppress(KeyboardInterrupt), share_prompts(model):
        accumulated(model, batch, ONE_BY_ONE, synchronises=False)
        raise KeyboardInterrupt
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.warns(UserWarning, match="2 prompts ran forward but not backward"), share_prompts(model):
        accumulated(model, batch, ONE_BY_ONE, synchronises=False)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("trained", ["up_proj", "visual", "layers.1.self_attn.k_proj", "lm_head"])
@pytest.mark.parametrize("before_it_ends", [1, 4])
def test_a_step_given_up_leaves_no_gradient_whatever_trains(before_it_ends, trained, to_none):
    model, batch = case("qwen2_5_vl")
    for parameter, value in model.named_parameters():
        value.requires_grad_(trained in parameter)
    plain = accumulated(model, batch, ONE_BY_ONE)
    with share_prompts(model):
        for _ in range(2):
            accumulated(model, batch, ONE_BY_ONE[:before_it_ends], synchronises=False, to_none=to_none)
            shared = accumulated(model, batch, ONE_BY_ONE, to_none=to_none)
    assert largest_relative(plain, shared) < 1e-6
