"""Where a batch is cut: its last prompt token is computed with the completions, and must be an ordinary one."""

import pytest
import torch
from support.models.families import IMAGE, build

from vgr_trl.sharing.generation import SharedGeneration
from vgr_trl.sharing.prefix_cache import SharingReport, UnsupportedModel
from vgr_trl.sharing.prefix_forward import SharedForward, find_split

CONFIG = build("qwen2_5_vl").config


def batch():
    """Two completions of two tokens behind a prompt of four."""
    ids = torch.tensor([[10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 30, 31]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}


def test_all_but_the_last_token_of_the_prompt_is_computed_once():
    cut = find_split(batch(), CONFIG, 2)
    assert (cut.start, cut.stop, cut.groups, cut.prompts) == (3, 5, [0, 0], 1)
    inputs = cut.prompt_inputs(batch())
    assert inputs["input_ids"].tolist() == [[10, 11, 12]]


@pytest.mark.parametrize("column", [3, 4, 5])
@pytest.mark.parametrize(("name", "value"), [("input_ids", IMAGE), ("mm_token_type_ids", 1)])
def test_images_at_the_end_of_the_prompt_and_behind(name, value, column):
    inputs = batch()
    inputs[name][:, column] = value
    with pytest.raises(UnsupportedModel, match="images in completions"):
        find_split(inputs, CONFIG, 2)


@pytest.mark.parametrize("column", [2, 3])
def test_padding_at_the_end_of_the_prompt(column):
    inputs = batch()
    inputs["attention_mask"][:, column] = 0
    with pytest.raises(UnsupportedModel, match="not padded on the left"):
        find_split(inputs, CONFIG, 2)


def test_padding_of_a_whole_completion():
    inputs = batch()
    inputs["attention_mask"][1, 4:] = 0
    assert find_split(inputs, CONFIG, 2).groups == [0, 0]


@pytest.mark.parametrize(("name", "value"), [("input_ids", IMAGE), ("mm_token_type_ids", 1)])
@pytest.mark.parametrize(("column", "refused"), [(3, True), (2, False)])
def test_prompts_that_end_with_an_image_are_not_generated_from(name, value, column, refused):
    """The last token is computed behind the others; an image that ends before it is among those."""
    model = build("qwen2_5_vl")
    report = SharingReport()
    forward = SharedForward(model.model, model.model.forward, report, None, None)
    generate = SharedGeneration(model, model.generate, forward, report)
    inputs = {key: value[:, :4].clone() for key, value in batch().items()}
    inputs[name][:, column] = value
    if refused:
        with pytest.raises(UnsupportedModel, match="a prompt that ends with an image"):
            generate._groups((), inputs)
    else:
        assert generate._groups((), inputs)[1:] == ([0, 0], 1)


@pytest.mark.parametrize("asked", [{"return_dict": False}, {"output_hidden_states": True}, {"output_attentions": True}])
def test_outputs_that_are_not_made(asked):
    with pytest.raises(UnsupportedModel, match=next(iter(asked))):
        find_split({**batch(), **asked}, CONFIG, 2)
    find_split({**batch(), "return_dict": True}, CONFIG, 2)


def test_a_report_of_nothing():
    """As many prompts as rows: nothing was shared."""
    assert SharingReport().prompts_per_row == 1.0
