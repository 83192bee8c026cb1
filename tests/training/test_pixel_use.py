from unittest.mock import patch

import pytest
import torch
from support.vllm import in_place_of_vllm

from vgr_trl.errors import DataError
from vgr_trl.metrics.collapse import first_signs
from vgr_trl.rollout_checks import PixelUse, compare_logps
from vgr_trl.signals.perturbation import perturb_images


@pytest.fixture
def make(vision_trainer):
    def build(**changed):
        options = {"check_pixels": True, "compute_attention_metrics": False, "rollout_log_steps": 0, "max_steps": 2}
        return vision_trainer(**{**options, **changed})

    return build


def cut_pixels(trainer):
    embed = trainer.model.model.visual.patch_embed
    plain = embed.forward
    embed.forward = lambda pixels: plain(torch.zeros_like(pixels))


def test_one_group_passes_again_once_and_the_change_is_logged(make, passes, caplog):
    trainer = make()
    with patch("vgr_trl.rollout_checks.perturb_images", wraps=perturb_images) as blanked:
        trainer.train()
    assert blanked.call_count == 1  # the image of the prompt, not of each completion
    assert [rows for trains, rows in passes if not trains] == [4, 4]  # the completions, and they behind a blank image
    (change,) = [entry["pixels/change"] for entry in trainer.state.log_history if "pixels/change" in entry]
    assert change > 1e-5


def test_a_model_whose_pixels_are_cut_stops_the_run(make):
    trainer = make()
    cut_pixels(trainer)
    with pytest.raises(DataError, match="tokens do not change with a blank image, so the model does not use its im"):
        trainer.train()
    trained = make(check_pixels=False, max_steps=1)
    cut_pixels(trained)
    trained.train()


def test_a_template_without_images_stops_the_run(make, monkeypatch):
    trainer = make()
    # This processor counts placeholders itself; others, which know no image token, take such a text.
    monkeypatch.setattr(type(trainer.processing_class), "validate_inputs", lambda *args, **kwargs: None)
    trainer.processing_class.chat_template = (
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"has 1 images, but no image token: use a chat template that writes images"):
        trainer.train()


def test_an_engine_far_from_the_trainer_is_warned_of(make, monkeypatch, caplog):
    in_place_of_vllm(monkeypatch)
    trainer = make(use_vllm=True, vllm_mode="colocate", max_steps=1, engine_distance_limit=1)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "engine/distance" in entry)
    assert logged["engine/distance"] > 1  # its log-probabilities are all -2.5
    assert any("those of the engine" in text for text in caplog.messages)
    assert len(first_signs([(1, logged)])) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_without_images_is_told_from_one_with_other_weights(processes):
    """Changes of the five tokens behind a blank image: 0.5, 0, 2, 0, 0.

    One engine has the first token of each row, 0.4 and 1.8 off, and 0.1 and 0.2 behind a blank image.
    """
    logps = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    blank = torch.tensor([[-1.5, -2.0, -1.0], [-3.0, -1.0, -1.0]])
    engine = torch.full((2, 3), torch.nan)
    engine[:, 0] = torch.tensor([-1.4, -2.8])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    near = torch.tensor([[-1.05, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    without, blind, near = (
        compare_logps(logps, blank, each, mask, lambda values: torch.cat([values] * processes))
        for each in (None, engine, near)
    )
    assert without == PixelUse(5 * processes, 0.5, 2.0)
    assert (blind.engine, blind.engine_blank) == (pytest.approx(1.1), pytest.approx(0.15))
    assert "With a blank image they are 0.15 from the trainer's: it gets no images." in blind.describe()
    assert near.engine == pytest.approx(0.01)
    assert near.describe().endswith("those of the engine are 0.01 from the trainer's.")
