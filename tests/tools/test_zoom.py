import re
from functools import partial

import pytest
import torch
from PIL import Image
from support.tool_runs import call, deal_turns
from support.trainers import tiny_model
from test_turns import rollout_of
from trl.chat_template_utils import qwen3_vl_chat_template

from vgr_trl.batch import Turns
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards.loading import load_reward
from vgr_trl.tools import LookAgain, Zoom, load_environment
from vgr_trl.views.perturbed_pass import perturb_turns

BOXES = {1: [[0, 0, 0.5, 0.5]], 2: [[1, 1, 0, 0], [0.25, 0.25, 0.75, 1]], 3: [[0.5, 0.5, 1, 1]]}


def zoomed(box, size=(200, 100)):
    """What `zoom` returns for an image that is red on the left of the middle and blue on the right."""
    image = Image.new("RGB", size, (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, size[0] // 2, size[1]))
    environment = Zoom()
    environment.reset(image=image)
    return environment.zoom(box)


@pytest.mark.parametrize(
    ("box", "size", "colour"),
    [
        ([0, 0, 0.5, 1], (100, 100), (255, 0, 0)),
        ([0.5, 0.25, 1.0, 0.75], (100, 50), (0, 0, 255)),
        ([0.75, -3, 7, 0.5], (50, 50), (0, 0, 255)),  # clamped
        ([0.9, 0.5, 0.91, 0.51], (28, 28), (0, 0, 255)),  # the smallest
        ([0.0, 0.999, 0.001, 1], (28, 28), (255, 0, 0)),  # in a corner
    ],
)
def test_boxes_by_hand(box, size, colour):
    part = zoomed(box)[0]["image"]
    assert part.size == size
    assert part.getcolors() == [(size[0] * size[1], colour)]
    assert zoomed(box, (20, 10))[0]["image"].size == (20, 10), "an image that is smaller than the smallest part"


def test_wrong_boxes_get_a_message_that_the_model_can_read():
    for box in ([0.5, 0, 0.5, 1], [100, 200, 300, 400], [0, 0, 1], "0 0 1 1", [0, 0, float("nan"), 1], None):
        assert zoomed(box).startswith(f"The box {box} is not a part of the image: give [left, top, right, bottom]")


def test_look_again():
    image, environment = Image.new("RGB", (30, 40), (1, 2, 3)), LookAgain()
    environment.reset(images=[image, Image.new("RGB", (5, 5))], prompt="")
    assert environment.look_again()[0]["image"].tobytes() == image.tobytes()
    with pytest.raises(DataError):
        environment.reset(prompt="")


def test_environments_by_name(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text("from vgr_trl.tools import Zoom\nclass Mine(Zoom):\n    pass\nmade = Mine()\n")
    assert load_environment("look_again") is load_environment("vgr_trl.tools.LookAgain") is LookAgain
    assert issubclass(load_environment(f"{file}:Mine"), Zoom)
    for spec in ("zoomed", f"{file}:Yours", f"{file}:made", "no_such_package.Mine"):
        with pytest.raises(ConfigError):
            load_environment(spec)


@pytest.mark.parametrize(
    ("text", "value"),
    [("<think>a</think><answer>B</answer>", 0), ("B", 0), ("<think>a<answer>B</answer>", -1), ("<answer>B", -1),
     ("<answer>" + "B" * 1000 + "</answer>", -1), ("<think><answer></think><answer>B</answer>", 0)],
)  # fmt: skip
def test_paired_tags(text, value):
    """Thoughts that the parser of calls has taken out are missing on both sides; what tools say does not count."""
    completion = [{"role": "assistant", "content": text}, {"role": "tool", "name": "zoom", "content": "<think>"}]
    assert load_reward("paired_tags")(completions=[completion]) == [value]


def test_a_part_of_a_perturbed_image():
    """With all images perturbed it is the part of the perturbed one; with those of tools alone, itself perturbed."""

    def darken(images, *, index, first=0):
        return [image.point(lambda value: value // 2) for image in images]

    environment, image = Zoom(), Image.effect_noise((100, 100), 80).convert("RGB")
    environment.reset(image=image)
    part, other = environment.zoom([0, 0.5, 0.5, 1])[0]["image"], Image.new("RGB", (9, 9), (200, 200, 200))
    turns = Turns([[1]], [[image, part, other]], [[part, other]], {})
    noisy = lambda images, **kwargs: [Image.effect_noise(each.size, 80).convert("RGB") for each in images]  # noqa: E731
    ((whole, again, beside),) = perturb_turns(turns, [0], [0], "all", noisy)
    assert again.tobytes() == whole.crop((0, 50, 50, 100)).tobytes() != part.tobytes()
    assert beside.tobytes() != other.tobytes()
    ((same, alone, _),) = perturb_turns(turns, [0], [0], "tools", darken)
    assert (same.tobytes(), alone.getpixel((3, 3))) == (image.tobytes(), tuple(v // 2 for v in part.getpixel((3, 3))))


def test_a_run_that_zooms(make, monkeypatch):
    """Rewards know turns, calls and images; a wrong box is a call without an image; crops of a grey image are grey."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    seen = {}

    def reward(completions, num_turns, num_tool_calls, num_returned_images, **kwargs):
        seen.update(turns=num_turns, calls=num_tool_calls, images=num_returned_images, completions=completions)
        return [float(count) for count in num_turns]

    rewards = [reward, load_reward("tool_reward"), load_reward("tool_cost")]
    deal = partial(deal_turns, asked=lambda place, turn: call("zoom", box=BOXES[place][turn]))
    perturbed = {"enable_perception_filtering": True, "perturbation": "mask_image"}
    trainer = make(rewards, environment_factory=Zoom, deal=deal, reward_weights=[0, 1.2, 0.1], **perturbed)
    rollout = rollout_of(trainer)
    assert (seen["turns"], seen["calls"], seen["images"]) == ([1, 2, 3, 2] * 2, [0, 1, 2, 1] * 2, [0, 1, 1, 1] * 2)
    assert list(trainer._logs["extra"]["num_tool_calls"]) == seen["calls"]
    said = [message["content"] for message in seen["completions"][2] if message["role"] == "tool"]
    assert "is not a part of the image" in said[0]
    right = [float("ABCD"[row % 4] == rollout.rows[row]["solution"]) for row in range(8)]
    assert rollout.rewards[:, 1].tolist() == [value * (row % 4 > 0) for row, value in enumerate(right)]
    assert rollout.rewards[:, 2].tolist() == [0, -1, -2, -1] * 2
    wide, high = rollout.turns.images[1][0].size
    assert rollout.turns.images[1][1].size == (max(-(-wide // 2), 28), max(-(-high // 2), 28))
    greys = {image.getcolors()[0][1] for of_row in rollout.perturbed_images.values() for image in of_row}
    assert greys == {(128, 128, 128)}
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))


def test_the_template_of_qwen3_vl(make, model_folder, monkeypatch):
    """What the policy has written of three turns counts, and what the template and the tools add does not."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr("support.tool_runs.TEMPLATE", qwen3_vl_chat_template)
    model, box = tiny_model(model_folder), [0, 0, 0.5, 0.5]
    model.config.text_config.max_position_embeddings = 4096  # each letter of the tools' description is a token
    deal = partial(deal_turns, asked=lambda place, turn: call("zoom", box=box))
    trainer = make(model=model, environment_factory=Zoom, deal=deal, token_weights=True)
    rollout = rollout_of(trainer)
    ids, mask, decode = rollout.batch.completion_ids[2], rollout.signals.mask[2], trainer._tokenizer.decode
    turn, end = call("zoom", box=box), "<|im_end|>"
    assert decode(ids[mask]) == f"green {turn}{end}the circle is {turn}{end}the circle is <answer>C</answer>{end}"
    added = decode(ids[~mask & rollout.batch.completion_mask[2].bool()])
    assert re.sub(r"(<\|image_pad\|>)+", "<image>", added) == 2 * (
        "\n<|im_start|>user\n<tool_response>\n<|vision_start|><image><|vision_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
