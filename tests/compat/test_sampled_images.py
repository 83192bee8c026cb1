from vgr_trl.patches import suppress_image_tokens


def test_image_tokens_are_suppressed_where_trl_does_not(vision_trainer):
    trainer = vision_trainer()
    token = trainer.model.config.image_token_id
    assert trainer.generation_config.suppress_tokens == [token], "by TRL, or by what is tested here"
    own = {name: value for name, value in trainer.generation_kwargs.items() if name != "suppress_tokens"}
    trainer.generation_kwargs = {**own, "temperature": 0.5}
    trainer.generation_config.suppress_tokens = None
    suppress_image_tokens(trainer, installed="1.16.0")
    assert trainer.generation_config.suppress_tokens is None
    suppress_image_tokens(trainer, installed="1.15.0")
    assert trainer.generation_config.suppress_tokens == trainer.generation_kwargs["suppress_tokens"] == [token]
    assert trainer.generation_config.temperature == 0.5
    trainer.generation_kwargs = {**own, "suppress_tokens": [3]}
    suppress_image_tokens(trainer, installed="1.15.0")
    assert trainer.generation_config.suppress_tokens == [3], "what the user says comes first"


def test_text_is_left_alone(text_trainer):
    trainer = text_trainer()
    suppress_image_tokens(trainer, installed="1.15.0")
    assert trainer.generation_config.suppress_tokens is None
