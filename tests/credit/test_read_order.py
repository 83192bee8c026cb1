"""What `complete_old_logps` relies on in TRL: `_compute_loss` reads the old log-probabilities after its own pass."""

import pytest
import torch
from support.trl_loss import make_trainer


class Watched(dict):
    """Inputs that note which of them are read, in order."""

    def __init__(self, values, read):
        super().__init__(values)
        self.read = read

    def __getitem__(self, name):
        self.read.append(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.append(name)
        return super().get(name, default)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_trl_reads_old_log_probabilities_after_its_pass(text_model, text_tokenizer, text_rows, tmp_path, loss_type):
    trainer = make_trainer(text_model, text_tokenizer, text_rows, tmp_path, loss_type=loss_type)
    read = []
    prompt = torch.zeros(2, 1, dtype=torch.long)
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    inputs = Watched(
        {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": torch.zeros(2, 3, dtype=torch.long),
            "completion_mask": torch.ones(2, 3, dtype=torch.long),
            "advantages": torch.ones(2),
            "num_items_in_batch": torch.tensor(6),
            "old_per_token_logps": torch.full((2, 3), torch.nan),
        },
        read,
    )

    def score(*args, **kwargs):
        assert "old_per_token_logps" not in read, "read before the pass that completes them"
        inputs["old_per_token_logps"] = logps.detach()
        return logps, torch.zeros(2, 3), None

    trainer._get_per_token_logps_and_entropies = score
    loss = trainer._compute_loss(trainer.model, inputs)
    assert "old_per_token_logps" in read
    assert loss.isfinite(), "what was completed is what TRL divides by"
