from unittest.mock import patch

import torch

from vgr_trl.sharing import share_prompts


def test_a_generate_that_is_not_that_of_transformers_is_called_once_as_it_is(text_model):
    """A mock, or a generate that another library has put in place, may not be asked to prefill prompts."""
    ids = torch.tensor([[5, 6, 7]] * 4)
    with patch.object(text_model, "generate", return_value=ids) as own, share_prompts(text_model) as report:
        assert text_model.generate(input_ids=ids, attention_mask=torch.ones_like(ids)) is ids
    assert own.call_count == 1
    assert own.call_args.kwargs["input_ids"] is ids
    assert report.plain == {"a generate that is not that of transformers": 1}
