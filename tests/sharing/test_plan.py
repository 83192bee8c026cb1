"""What the start of a run says about sharing is what the run does."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from peft import LoraConfig
from support.models.families import build as build_model
from support.steps import DAPO, STOCK, build_trainer, largest_relative_update, options, trained
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vgr_trl.validate import plan_sharing

ROWS = Dataset.from_dict({"prompt": ["red blue green teal " * 6] * 8})
ON = "generation on, scoring on, training on; completions of a prompt kept together"


@pytest.fixture
def make(text_tokenizer, tmp_path):
    def build(model=None, more=None, **changed):
        model = build_model("qwen3") if model is None else model
        return build_trainer(DAPO, model, text_tokenizer, ROWS, options(tmp_path, **changed), **(more or {}))

    return build


def test_everything_is_on_by_default(make):
    assert str(make().sharing) == f"share_prompts=auto: {ON}"
    assert str(make(share_prompts="off").sharing) == "share_prompts=off"


@pytest.mark.parametrize(
    ("mode", "order"), [("auto", "shuffled (the loss"), ("on", "kept together, although the loss")]
)
def test_a_loss_that_divides_by_the_micro_batch_keeps_its_order_unless_told_otherwise(mode, order, make):
    said = str(make(loss_type="bnpo", share_prompts=mode).sharing)
    assert f"{order} bnpo divides by the tokens of a micro-batch" in said


@pytest.mark.parametrize(
    ("mode", "changed", "places"),
    [
        ("auto", {"zero": 3}, ("on", "on", "on")),
        ("auto", {"fsdp": 2}, ("off (FSDP)", "on", "on")),
        ("on", {"fsdp": 1}, ("off (FSDP)", "on", "off (the first version of FSDP)")),
        ("auto", {"compile": "INDUCTOR"}, ("on", "off (torch.compile)", "off (torch.compile)")),
        ("auto", {"vllm": True}, ("off (vLLM shares prompts itself)", "on", "on")),
        ("off", {}, ("off (share_prompts=off)",) * 3),
    ],
)
def test_what_a_trainer_is_launched_with(mode, changed, places, make, monkeypatch):
    """The plan reads what accelerate and TRL know of a run: here set by hand, as on many GPUs."""
    trainer = make(share_prompts=mode)
    zero, fsdp = changed.get("zero"), changed.get("fsdp")
    state = SimpleNamespace(
        dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value=changed.get("compile", "NO"))),
        fsdp_plugin=SimpleNamespace(fsdp_version=fsdp),
    )
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
    monkeypatch.setattr(trainer, "is_fsdp_enabled", fsdp is not None)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", zero is not None)
    monkeypatch.setattr(trainer.args, "deepspeed_plugin", SimpleNamespace(zero_stage=zero))
    monkeypatch.setattr(trainer, "use_vllm", changed.get("vllm", False))
    monkeypatch.setattr(trainer, "use_transformers_continuous_batching", changed.get("continuous", False))
    plan = plan_sharing(trainer)
    assert (str(plan.generation), str(plan.scoring), str(plan.training)) == places
    assert plan.sharded == (zero == 3 or fsdp is not None)
    assert plan.regroups == (places[2] == "on")


def test_a_compiled_run_says_so(make):
    trainer = make(torch_compile=True, torch_compile_backend="eager")
    assert str(trainer.sharing) == (
        "share_prompts=auto: generation on, scoring off (torch.compile), training off (torch.compile); completions of "
        "a prompt shuffled (training is off)"
    )


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing_trains_plainly(vision, image_rows, tmp_path):
    """TRL forces it for adapters under ZeRO-3. Gradients would be wrong, so only the training passes are plain."""
    model, processor = vision
    settings = options(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    settings |= {"beta": 0.1, "learning_rate": 0.5, "epsilon_high": 0.28}
    peft = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    stock = trained(STOCK, model, processor, image_rows, settings, peft_config=LoraConfig(**peft))
    ours = trained(DAPO, model, processor, image_rows, settings, peft_config=LoraConfig(**peft))
    assert str(ours.sharing.training) == "off (gradient checkpointing with use_reentrant=True)"
    assert ours.places["training"].rows == 0
    assert ours.places["generation"].prompts_per_row == ours.places["scoring"].prompts_per_row == 1 / 4
    assert largest_relative_update(model, ours, stock) < 1e-5


@pytest.mark.parametrize(("coefficient", "training"), [(None, "off (the load-balancing loss"), (0.0, "on")])
def test_the_load_balancing_loss_of_experts(coefficient, training, make):
    body = dict(build_model("qwen3").config.to_dict(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{key: body[key] for key in body if key != "model_type"}))
    trainer = make(model, router_aux_loss_coef=coefficient)
    assert str(trainer.sharing.training).startswith(training)
    assert str(trainer.sharing.scoring) == "on"


@pytest.mark.parametrize(("lora", "attention"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_dropout_is_announced(lora, attention, make):
    """The mode of the model at the start does not matter: TRL trains it in training mode."""
    model = build_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = attention
    trainer = make(model, {"peft_config": LoraConfig(r=2, lora_dropout=lora, target_modules=["q_proj"])})
    announced = "; with dropout or noise in routers, the completions of a prompt share what is drawn over it"
    assert str(trainer.sharing).endswith(announced) == bool(lora or attention)
