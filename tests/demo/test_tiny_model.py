"""The tiny model reads images, and its processor survives a round trip."""

import torch
from support import trainers
from transformers import AutoProcessor
from trl import GRPOTrainer

from vgr_trl.demo.demo import encode, target_text


def test_the_model_sees_the_image(tiny, demo_rows):
    model, processor = tiny
    inputs, lengths = encode(processor, demo_rows[:2], images=True)
    assert (inputs["input_ids"] == model.config.image_token_id).sum(1).tolist() == [4, 4]
    assert lengths.tolist() == [len(processor.tokenizer(target_text(row))["input_ids"]) for row in demo_rows[:2]]
    model.eval()
    with torch.no_grad():
        logits = model(**inputs).logits
        inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
        assert not torch.allclose(logits, model(**inputs).logits)


def test_every_word_is_one_token_and_tags_are_ordinary(tiny):
    tokenizer = tiny[1].tokenizer
    text = "<think>a blue circle northwest</think><answer>B</answer><|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    assert tokenizer.decode(tokenizer("naïve ☂")["input_ids"]) == "naïve ☂"


def test_processor_is_saved_and_loaded(tiny, demo_rows, tmp_path):
    model, processor = tiny
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded).__module__.startswith("transformers."), "no code of this package"
    before, after = (encode(each, demo_rows[:3], images=True)[0] for each in (processor, loaded))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(before[name], after[name])
    assert loaded.tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_trl_alone_trains_the_saved_model_on_images(model_folder, question_files, tmp_path):
    rows = trainers.prompts(trainers.train_file(question_files))
    args = trainers.config(tmp_path, trainers.STOCK[1], max_steps=1)
    trainer = GRPOTrainer(str(model_folder), trainers.letters_reward, args, rows)
    before = trainer.model.model.visual.patch_embed.proj.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.model.visual.patch_embed.proj.weight)
