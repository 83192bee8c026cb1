import pytest
import torch
from support.models.families import OTHERS, build, make_batch


@pytest.fixture
def paligemma():
    model, batch = build(OTHERS["paligemma"]), make_batch(OTHERS["paligemma"])
    types = torch.zeros_like(batch.inputs["input_ids"])
    types[:, -batch.completion_length :] = 1
    batch.inputs["token_type_ids"] = types
    return model, batch
