"""Which tokens have a loss, which part of a micro-batch runs for them, and which rows run together."""

import pytest
import torch
from text_runs import VOCABULARY, build_model
from transformers import GPT2Config, GPT2LMHeadModel
from trl.trainer.utils import add_fused_lm_head

from vgr_trl.efficiency.loss_mask import (
    Extent,
    Window,
    extents_of,
    find_loss_mask,
    find_window,
    group_by_length,
    only_tokens,
    pack_rows,
    scatter_back,
    take_rows,
    tokens_of,
    trim,
    why_padding_counts,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
PROMPTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])


def test_tokens_with_loss_by_completion():
    advantages = torch.tensor([0.0, -1.0, float("nan"), 2.0])
    assert find_loss_mask(advantages, MASK, rows=True, tokens=True).tolist() == [
        [False] * 4, [True, True, False, False], [True] * 4, [False] * 4,
    ]  # fmt: skip
    assert torch.equal(find_loss_mask(advantages, MASK, rows=False, tokens=False), MASK.bool())


def test_tokens_with_loss_by_token():
    advantages = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0] * 4, [1.0] * 4])
    assert find_loss_mask(advantages, MASK, rows=True, tokens=True).nonzero().tolist() == [[0, 1]]
    assert find_loss_mask(advantages, MASK, rows=True, tokens=False).nonzero().tolist() == [[0, 0], [0, 1], [0, 2]]


LOSS_MASK = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()


def test_the_window_ends_with_the_last_token_with_loss_and_begins_with_the_longest_prompt():
    assert find_window(LOSS_MASK, PROMPTS, rows=True, padding=True) == Window([0], 2, 2)
    assert find_window(LOSS_MASK, PROMPTS, rows=False, padding=True) == Window([0, 1, 2, 3], 4, 2)
    assert find_window(LOSS_MASK, PROMPTS, rows=True, padding=False) == Window([0], 4, 4)
    assert find_window(LOSS_MASK, PROMPTS, rows=True, padding=True, multiple=3) == Window([0], 3, 3)


def test_without_a_token_with_loss_the_shortest_prompt_runs():
    assert find_window(LOSS_MASK & False, PROMPTS, rows=True, padding=True) == Window([3], 1, 1)


def test_an_image_stays_if_there_was_one():
    """The parameters of the vision tower take part in every pass then."""
    assert find_window(LOSS_MASK, PROMPTS, [0, 1, 1, 0], rows=True, padding=True) == Window([0, 1], 3, 2)
    assert find_window(LOSS_MASK, PROMPTS, [1, 1, 0, 0], rows=True, padding=True) == Window([0], 2, 2)
    assert find_window(LOSS_MASK & False, PROMPTS, [0, 0, 1, 0], rows=True, padding=True) == Window([2], 4, 1)


def test_parts_of_inputs_and_whole_outputs():
    """Rows 0 and 2 of three, the last 2 of 3 prompt columns and the first of 2 completion columns."""
    inputs = {
        "input_ids": torch.arange(15).view(3, 5),
        "attention_mask": torch.ones(3, 5),
        "logits_to_keep": 2,
        "num_images": [1, 0, 2],
        "pixel_values": torch.arange(3.0).view(3, 1, 1, 1),
        "compute_entropy": True,
        "token_type_ids": None,
    }
    window = Window([0, 2], 2, 1)
    part = trim(inputs, window)
    assert part["input_ids"].tolist() == [[1, 2, 3], [11, 12, 13]]
    assert part["attention_mask"].shape == (2, 3)
    assert part["pixel_values"].flatten().tolist() == [0, 1, 2]
    assert (part["num_images"], part["logits_to_keep"], part["compute_entropy"]) == ([1, 2], 1, True)
    last = trim(inputs, Window([1], 3, 2))
    assert last["num_images"] == [0]
    assert "pixel_values" not in last

    loss_mask = torch.tensor([[True, False], [False, False], [False, False]])
    old = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")], [-5.0, -6.0]])
    values = torch.tensor([[-7.0], [-8.0]], requires_grad=True)
    whole = scatter_back(values, window, loss_mask, old)
    assert whole.tolist() == [[-7.0, -2.0], [-3.0, 0.0], [-5.0, -6.0]]
    whole.sum().backward()
    assert values.grad.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("wanted", [torch.tensor([[1, 0, 1], [0, 0, 1]]).bool(), torch.zeros(2, 3).bool()])
def test_the_head_scores_wanted_tokens_alone(wanted):
    """The other tokens are not projected; without any, every parameter still gets a gradient, of 0."""
    model = build_model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(4, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :5] = -100
    labels[0, -1] = -100  # padding

    def run():
        model.zero_grad()
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
        logps, entropies = outputs.log_probs[:, -3:] * wanted, outputs.entropy[:, -3:] * wanted
        (logps.sum() + entropies.sum()).backward()
        return logps, entropies, [parameter.grad.clone() for parameter in model.parameters()]

    projected = []
    plain = run()
    original = model.get_output_embeddings
    base = model.base_model
    with only_tokens(model, base, wanted):
        hook = base.register_forward_hook(lambda module, args, outputs: projected.append(outputs.last_hidden_state))
        logits = model(input_ids=ids).logits
        found = run()
        hook.remove()
    assert original() is model.get_output_embeddings()
    assert logits.shape == (2, 8, VOCABULARY)
    assert projected[-1].shape == (1, int((wanted & (labels[:, -3:] != -100)).sum()), 16)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)  # float32, gradients up to 1
    torch.testing.assert_close(run(), plain)


def test_padding_is_left_where_positions_count_it():
    absolute = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8))
    assert why_padding_counts(absolute.base_model) == "positions of type absolute count it"
    model = build_model()
    assert why_padding_counts(model.base_model) is None
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert why_padding_counts(model.base_model) == "positions of type dynamic count it"


GROUPS = [0, 0, 1, 1, 2, 2]
LENGTHS = [3, 5, 0, 0, 4, 9]


def test_groups_stand_by_their_longest_row_and_rows_within_them_likewise():
    assert group_by_length([2, 0, 4, 3, 1, 5], GROUPS, LENGTHS, window=6) == [5, 4, 1, 0, 2, 3]
    assert group_by_length([3, 2], GROUPS, LENGTHS, window=6) == [3, 2]


def test_rows_of_other_steps_keep_their_places():
    assert group_by_length([2, 0, 4, 3, 1, 5], GROUPS, LENGTHS, window=3) == [4, 0, 2, 5, 1, 3]


def test_parts_of_at_most_so_many_tokens():
    """Two rows of a prompt of 10: 10 + 2 * 4 = 18 tokens where it is shared, 2 * (10 + 4) = 28 where it is not.

    All rows, the prompt of 6 made as wide as that of 10: 2 * 10 + 4 * 4 = 36.
    """
    extents = [Extent(10, 4, True), Extent(10, 2, True), Extent(6, 4, True), Extent(6, 0, False), Extent(6, 4, True)]

    def parts(groups, most):
        return pack_rows(5, lambda rows: tokens_of(rows, extents, groups), most)

    groups = [0, 0, 1, 1, 1]
    assert parts(groups, 18) == [[0, 1], [2, 3, 4]]
    assert parts(groups, 17) == [[0], [1], [2, 3, 4]]
    assert parts(None, 28) == [[0, 1], [2, 3, 4]]
    assert parts(None, 1) == [[0], [1], [2, 3], [4]]
    assert parts(groups, 35) == [[0, 1, 2, 3], [4]]
    assert parts(groups, 36) == [[0, 1, 2, 3, 4]]


def test_what_runs_of_each_row():
    loss_mask = torch.tensor([[0, 1, 0], [0, 0, 0]]).bool()
    prompts = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert extents_of(loss_mask, prompts, rows=True, padding=True) == [Extent(3, 2, True), Extent(4, 0, False)]
    assert extents_of(loss_mask, prompts, rows=False, padding=False) == [Extent(4, 3, True), Extent(4, 3, True)]


def test_rows_of_a_batch_with_their_images():
    batch = {
        "prompt_ids": torch.arange(6).view(3, 2),
        "advantages": torch.tensor([1.0, 2.0, 3.0]),
        "num_items_in_batch": torch.tensor(7),
        "num_images": [1, 0, 2],
        "num_tiles": None,
        "pixel_values": torch.arange(3.0).view(3, 1, 1, 1),
        "perturbed_pixel_values": [torch.zeros(1), torch.zeros(0), torch.ones(2)],
    }
    part = take_rows(batch, [1, 2])
    assert part["prompt_ids"].tolist() == [[2, 3], [4, 5]]
    assert part["advantages"].tolist() == [2.0, 3.0]
    assert (part["num_items_in_batch"], part["num_images"], part["num_tiles"]) == (7, [0, 2], None)
    assert part["pixel_values"].flatten().tolist() == [1.0, 2.0]
    assert [len(pixels) for pixels in part["perturbed_pixel_values"]] == [0, 2]
    assert "pixel_values" not in take_rows(batch, [1])
