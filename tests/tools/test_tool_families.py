import re

import pytest
import torch
from support.models.families import FAMILIES, PINPOINTS, Family, build
from support.models.processors import FOUR_TOKENS, GEMMA, IDEFICS, INTERN, byte_tokenizer, processor
from support.tool_runs import TEMPLATE, deal_turns, look
from support.trainers import begin, config, letters_reward, prompts, train_file
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from trl.chat_template_utils import qwen3_template

from vgr_trl.errors import DataError
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.trl_bridge import to_scoring

SIZE = {"height": 16, "width": 16}
SHORT = {"size": {"shortest_edge": 16}, "crop_size": SIZE}
LONGEST = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
PATCHES = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
LLAVA, VIDEO = {"image_token": "<image>"}, {"video_token": "<video>"}
PROCESSORS = {  # family -> arguments of `processor`
    "gemma3": ("Gemma3Processor", Gemma3ImageProcessorPil(size=SIZE), GEMMA, FOUR_TOKENS),
    "internvl": ("InternVLProcessor", GotOcr2ImageProcessorPil(size=SIZE), INTERN | VIDEO, FOUR_TOKENS),
    "llava": ("LlavaProcessor", LlavaImageProcessorPil(**SHORT), LLAVA, PATCHES),
    "llava_next": (
        "LlavaNextProcessor", LlavaNextImageProcessorPil(**SHORT, image_grid_pinpoints=PINPOINTS), LLAVA, PATCHES,
    ),
    "idefics3": ("Idefics3Processor", Idefics3ImageProcessorPil(**LONGEST), IDEFICS, {"image_seq_len": 4}),
}  # fmt: skip


@pytest.fixture
def make(question_files, tmp_path):
    def trainer(name, **options):
        kind, images, special, more = PROCESSORS[name]
        made = processor(kind, images, special, byte_tokenizer, **more)
        template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", made.image_token)
        made.chat_template = made.tokenizer.chat_template = template
        made.tokenizer.response_template = qwen3_template
        made.tokenizer.padding_side = "left"
        token = made.tokenizer.image_token if name == "gemma3" else made.image_token
        image = made.tokenizer.convert_tokens_to_ids(token)
        smaller = FAMILIES[name].build()
        smaller.config.image_token_id, smaller.config.boi_token_index = image, image + 1
        smaller.config.text_config.vocab_size = len(made.tokenizer)
        smaller.config.text_config.max_position_embeddings = 4096
        model = build(Family(name, lambda: type(smaller)(smaller.config)))
        model.generation_config.eos_token_id = made.tokenizer.eos_token_id
        model.config.text_config.eos_token_id = made.tokenizer.eos_token_id
        rows = prompts(train_file(question_files))
        args = config(tmp_path / "run", max_completion_length=600, max_steps=1, **options)
        built = DAPOTrainer(model, letters_reward, args, rows, processing_class=made, tools=[look])
        built.model.generate = deal_turns(built)
        return built

    return trainer


def whole_rows(trainer, rollout):
    """The inputs of each row of a rollout as the processor makes them of its text and its images together."""
    made, batch = trainer.processing_class, rollout.batch
    run = rf"{re.escape(made.full_image_sequence)}" if hasattr(made, "full_image_sequence") else None
    for row, images in enumerate(rollout.turns.images):
        ids = batch.ids[row]
        mask = batch.model_inputs["attention_mask"][row].bool()
        text = made.tokenizer.decode(ids[mask])
        if run is None:
            token = re.escape(made.image_token)
            edges = [re.escape(getattr(made, f"{end}_image_token", "")) for end in ("start", "end")]
            run = rf"{edges[0]}({token})+{edges[1]}"
        yield ids[mask], mask, made(text=[re.sub(run, made.image_token, text)], images=[images], return_tensors="pt")


@pytest.mark.parametrize("name", ["gemma3", "internvl", "llava", "llava_next"])
def test_rows_with_images_of_tools_are_the_processors(make, name):
    """Every token and token type of a row, and its log-probabilities, from one plain pass over that row alone."""
    trainer, seen = make(name, token_weights=True, temperature=1.0), []
    dealt = trainer.model.generate

    def generate(input_ids, generation_config, **inputs):
        given = {"input_ids": input_ids, "generation_config": generation_config, **inputs}
        type(trainer.model).generate(trainer.model, **given, max_new_tokens=1)  # takes every input, with every feature
        seen.append(inputs)
        return dealt(input_ids)

    trainer.model.generate = generate
    with trainer.new_rollout(begin(trainer)) as rollout:
        trainer.generate_and_score(rollout)
    assert len(seen) == 3
    assert rollout.signals.attention.seen_vision is not None
    batch = rollout.batch
    with torch.no_grad():  # as `_compute_loss` does
        inputs = to_scoring(batch)
        again, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, batch_size=3, **inputs)
    pixels = []
    for row, (ids, mask, whole) in enumerate(whole_rows(trainer, rollout)):
        assert ids.tolist() == whole["input_ids"][0].tolist()
        pixels.append(whole["pixel_values"])
        if "token_type_ids" in whole:
            assert batch.columns["token_type_ids"][row][mask].tolist() == whole["token_type_ids"][0].tolist()
        with torch.no_grad():
            logits = trainer.model(**{key: value for key, value in whole.items() if key != "num_crops"}).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        own = rollout.signals.mask[row]
        expected = logps[-int(batch.completion_mask[row].sum()) :][own[batch.completion_mask[row].bool()]]
        assert torch.allclose(rollout.signals.logps[row][own], expected, atol=2e-5)
        assert torch.allclose(again[row][own], expected, atol=2e-5)
    assert torch.equal(batch.images.tensors["pixel_values"], torch.cat(pixels))
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["grad_norm"]))


def test_pixels_that_lie_by_rows_are_refused(make):
    """TRL makes one row of the images of all; the first turn behind an image would show them to the wrong rows."""
    trainer = make("idefics3")
    with pytest.raises(DataError):
        trainer._generate_and_score_completions(begin(trainer))
