"""What is recorded of completions of several turns."""

from vgr_trl.reporting.records import read_run


def test_returned_images_are_recorded_with_the_attention_on_them(make, tmp_path):
    trainer = make(
        rollout_log_steps=1, rollout_log_samples=8, enable_perception_filtering=True, perturbation="mask_image"
    )
    trainer.train()
    (record,) = read_run(tmp_path / "run").records("train")
    assert [len(each.images) for each in record.completions] == [1, 2, 3, 2] * 2
    assert len({each.question for each in record.completions}) == 2, "the questions of two prompts"
    third = record.completions[2]
    assert [(image.width, image.grid) for image in third.images[1:]] == [(56, [2, 2]), (112, [2, 4])]
    assert len({image.file for image in third.images}) == 3
    assert None not in {image.perturbed for image in third.images}
    assert third.tokens.count("<image>") == 2
    assert "<|image_pad|>" not in third.tokens
    assert "a circle is teal" in third.text
    cells = sum(rows * columns for rows, columns in (image.grid for image in third.images))
    assert len(third.attention.values) == cells * len(third.attention.scale) == cells * len(third.tokens)
    assert [turn.calls for turn in third.turns] == [["look(wide=56)"], ["look(wide=112)"], []]
    assert [(turn.answers, turn.images) for turn in third.turns] == [(["<image>a circle is teal"], 1)] * 2 + [([], 0)]
    written = ["".join(third.tokens[turn.start : turn.stop]) for turn in third.turns]
    assert [text.count("<tool_call>") for text in written] == [1, 1, 0]
    assert [text.count("<|im_end|>") for text in written] == [1, 1, 1]
    assert not any("im_start" in text or "<image>" in text for text in written)
    late = len(third.tokens) - 2
    attention = list(third.attention.values[late * cells : (late + 1) * cells])
    assert any(attention[-12:]), "the last token sees the images of tools"
    assert not any(third.attention.values[cells - 12 : cells]), "the first token sees none of them"
