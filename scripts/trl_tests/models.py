"""Tiny models with random weights under the names of the hub's, in a folder that looks like the hub's cache."""

import importlib
import json

import torch
import transformers
from trl_tests.vocabularies import QWEN3, QWEN3_5, find_template, make_small, make_tokenizer

ORGANISATION = "trl-internal-testing"
SMALL, WHOLE = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"  # revisions
TEXT = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
VISION = {"hidden_size": 16, "intermediate_size": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WITH_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def randomise(model):
    """Draw weights that are large enough for a gradient in every parameter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim >= 2:
                inputs = weights[0].numel() if weights.ndim == 2 else weights.shape[-1]
                scale = 0.05 if "embed" in name else inputs**-0.5
                weights.copy_(torch.randn(weights.shape, generator=generator) * scale)
            elif name.endswith("bias"):
                weights.copy_(torch.randn(weights.shape, generator=generator) * 0.02)
    return model


def describe_text(tokenizer, **options):
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": pad, "bos_token_id": pad}
    return TEXT | ids | options


def find_ids(tokenizer, **names):
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def make_text(kind, make_tokenizer, head="CausalLM", **options):
    tokenizer = make_tokenizer()
    config = getattr(transformers, f"{kind}Config")(**describe_text(tokenizer, **{"hidden_size": 8} | options))
    return randomise(getattr(transformers, f"{kind}For{head}")(config)), tokenizer


def make_qwen(template, vocabulary=None):
    return make_tokenizer(vocabulary or QWEN3.shrink(), template=find_template(template))


def make_qwen2(vocabulary=None):
    return make_qwen("qwen2_5", vocabulary)


def make_qwen3():
    return make_qwen("qwen3")


def make_llama():
    named = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|finetune_right_pad_id|>".split()
    return make_small(*named, eos="<|eot_id|>", pad="<|eot_id|>", template=find_template("llama3_2"))


def make_image_processor(module, name, **options):
    """Return the image processor that needs no torchvision, where transformers has one."""
    folder = f"transformers.models.{module}"
    try:
        found = getattr(importlib.import_module(f"{folder}.image_processing_pil_{module}"), f"{name}Pil")
    except ImportError:
        found = getattr(importlib.import_module(f"{folder}.image_processing_{module}"), name)
    return found(**options)


def make_qwen_vl(kind, **vision):
    named = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = make_small(*named, extra_special_tokens={"image_token": named[2], "video_token": named[3]})
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    rope = ROPE | {"mrope_section": [1, 1]}
    text = describe_text(tokenizer, hidden_size=16, rope_parameters=rope, max_position_embeddings=4096)
    vision |= {"hidden_size": 16, "num_heads": 4, "depth": 2, "patch_size": 14}
    ids = find_ids(tokenizer, **dict(zip(keys, named, strict=True)))
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    images = make_image_processor("qwen2_vl", "Qwen2VLImageProcessor", patch_size=14, size=size)
    template = find_template("qwen2_5_vl", image=WITH_IMAGE)
    processor = getattr(transformers, f"{kind}Processor")(images, tokenizer, chat_template=template)
    return randomise(getattr(transformers, f"{kind}ForConditionalGeneration")(config)), processor


def make_qwen3_5(kind, template, **experts):
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    named |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    tokenizer = make_tokenizer(QWEN3_5.shrink(), extra_special_tokens=named)
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    rope = ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "max_position_embeddings": 4096}
    text = describe_text(tokenizer, hidden_size=16, rope_parameters=rope, **linear, **layers, **experts)
    vision = VISION | {"num_heads": 4, "depth": 2, "out_hidden_size": 16, "patch_size": 16}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": []}
    ids = find_ids(tokenizer, **dict(zip(keys, named.values(), strict=True)))
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    images = make_image_processor("qwen2_vl", "Qwen2VLImageProcessor", patch_size=16, size=size)
    chat = find_template(template, image=WITH_IMAGE)
    processor = transformers.Qwen3VLProcessor(images, tokenizer, chat_template=chat)
    return randomise(getattr(transformers, f"{kind}ForConditionalGeneration")(config)), processor


def make_gemma3():
    named = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    special = dict(zip(("boi_token", "eoi_token", "image_token"), named[3:], strict=True))
    tokenizer = make_small(*named, eos=named[2], bos_token=named[0], extra_special_tokens=special)
    text = describe_text(tokenizer, hidden_size=16, head_dim=8, sliding_window=64)
    text["bos_token_id"] = tokenizer.bos_token_id
    vision = VISION | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    ids = find_ids(tokenizer, boi_token_index=named[3], eoi_token_index=named[4], image_token_index=named[5])
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"vision_use_head": False}, mm_tokens_per_image=16, **ids
    )
    size = {"height": 56, "width": 56}
    images = make_image_processor("gemma3", "Gemma3ImageProcessor", size=size, image_seq_length=16)
    template = find_template("gemma3", image=named[3])
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=16, chat_template=template)
    return randomise(transformers.Gemma3ForConditionalGeneration(config)), processor


def make_llava(kind, module, name, size=None, **pinned):
    tokenizer = make_small("<image>", extra_special_tokens={"image_token": "<image>"})
    text = describe_text(tokenizer, hidden_size=16, model_type="llama")
    vision = VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 28, "patch_size": 14, "projection_dim": 16}
    features = {"vision_feature_select_strategy": "default"}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, vision_feature_layer=-2, **features, **pinned, **(size or {}),
        **find_ids(tokenizer, image_token_index="<image>"),
    )  # fmt: skip
    crop = {"height": 28, "width": 28}
    images = make_image_processor(module, name, size={"shortest_edge": 28}, crop_size=crop, **pinned)
    processor = getattr(transformers, f"{kind}Processor")(
        images, tokenizer, patch_size=14, num_additional_image_tokens=1, image_token="<image>", **features,
        chat_template=find_template("llava_next", image="<image>"),
    )  # fmt: skip
    return randomise(getattr(transformers, f"{kind}ForConditionalGeneration")(config)), processor


SCORES = {"head": "SequenceClassification", "hidden_size": 16, "num_labels": 1}
MODELS = {
    "Qwen2ForCausalLM-2.5": lambda: make_text("Qwen2", make_qwen2),
    "Qwen2ForSequenceClassification-2.5": lambda: make_text("Qwen2", make_qwen2, **SCORES),
    "Qwen3ForCausalLM": lambda: make_text("Qwen3", make_qwen3, head_dim=8),
    "Qwen3ForSequenceClassification": lambda: make_text("Qwen3", make_qwen3, head_dim=8, **SCORES),
    "Qwen3MoeForCausalLM": lambda: make_text("Qwen3Moe", make_qwen3, head_dim=8, norm_topk_prob=True, **EXPERTS),
    "LlamaForCausalLM-3.2": lambda: make_text("Llama", make_llama),
    "LlamaForSequenceClassification-3.2": lambda: make_text("Llama", make_llama, **SCORES),
    "MistralForCausalLM-0.2": lambda: make_text("Mistral", make_small),
    "Gemma2ForCausalLM": lambda: make_text("Gemma2", make_small, head_dim=4),
    "Cohere2ForCausalLM": lambda: make_text("Cohere2", make_small, logit_scale=1.0),
    "Glm4MoeForCausalLM": lambda: make_text(
        "Glm4Moe", make_small, moe_intermediate_size=16, head_dim=4, n_routed_experts=4, num_experts_per_tok=2,
        attention_bias=True, use_qk_norm=True, first_k_dense_replace=1,
    ),
    "GptOssForCausalLM": lambda: make_text(
        "GptOss", make_small, head_dim=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE
    ),
    "NemotronHForCausalLM-nano": lambda: make_text(
        "NemotronH", make_small, head_dim=4, layers_block_type=["mamba", "moe", "attention"], num_hidden_layers=3,
        mamba_num_heads=4, mamba_head_dim=4, ssm_state_size=8, n_groups=1, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, chunk_size=16,
    ),
    "RemoteForCausalLM": lambda: make_text("Llama", make_small),
    "Qwen2_5_VLForConditionalGeneration": lambda: make_qwen_vl(
        "Qwen2_5_VL", fullatt_block_indexes=[1], out_hidden_size=16, intermediate_size=32
    ),
    "Qwen2VLForConditionalGeneration": lambda: make_qwen_vl("Qwen2VL", embed_dim=16, mlp_ratio=2),
    "Qwen3_5ForConditionalGeneration-NoThink": lambda: make_qwen3_5("Qwen3_5", "qwen3_5_nothink"),
    "Qwen3_5MoeForConditionalGeneration-3.6": lambda: make_qwen3_5(
        "Qwen3_5Moe", "qwen3_6", shared_expert_intermediate_size=16, **EXPERTS
    ),
    "Gemma3ForConditionalGeneration": make_gemma3,
    "LlavaNextForConditionalGeneration": lambda: make_llava(
        "LlavaNext", "llava_next", "LlavaNextImageProcessor", image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
    ),
    "LlavaForConditionalGeneration": lambda: make_llava(
        "Llava", "clip", "CLIPImageProcessor", size={"image_seq_length": 4}
    ),
}  # fmt: skip


def leave_out_video_processors():
    """Let processors of Qwen-VL exist without one, because transformers' video processors need torchvision."""
    kind = transformers.ProcessorMixin
    attributes = kind.get_attributes.__func__
    kind.get_attributes = classmethod(lambda own: [name for name in attributes(own) if name != "video_processor"])


def write_hub(hub):
    """Write every model where the hub's names lead to it; the first also with Qwen's whole vocabulary."""
    for name, make in MODELS.items():
        save(*make(), hub, name, SMALL)
    first = next(iter(MODELS))
    save(*make_text("Qwen2", lambda: make_qwen2(QWEN3)), hub, first, WHOLE)
    choose_vocabulary(hub, whole=False)
    make_remote(hub / f"models--{ORGANISATION}--tiny-RemoteForCausalLM" / "snapshots" / SMALL)


def save(model, processor, hub, name, revision):
    tokenizer = getattr(processor, "tokenizer", processor)
    if (options := getattr(model, "generation_config", None)) is not None:
        options.eos_token_id, options.pad_token_id = [tokenizer.eos_token_id], tokenizer.pad_token_id
        options.bos_token_id = tokenizer.bos_token_id
    repository = hub / f"models--{ORGANISATION}--tiny-{name}"
    model.save_pretrained(repository / "snapshots" / revision)
    processor.save_pretrained(repository / "snapshots" / revision)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)


def choose_vocabulary(hub, whole):
    """Let the name of the first model lead to the one with the whole or the small vocabulary."""
    reference = hub / f"models--{ORGANISATION}--tiny-{next(iter(MODELS))}" / "refs" / "main"
    reference.write_text(WHOLE if whole else SMALL)


def make_remote(folder):
    """Turn a saved Llama into a model with code of its own, which loads with `trust_remote_code` only."""
    (folder / "configuration_remote.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass RemoteConfig(LlamaConfig):\n    model_type = 'remote'\n"
    )
    (folder / "modeling_remote.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_remote import RemoteConfig\n\n\n"
        "class RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n"
    )
    file = folder / "config.json"
    kinds = {"AutoConfig": "configuration_remote.RemoteConfig"}
    kinds["AutoModelForCausalLM"] = "modeling_remote.RemoteForCausalLM"
    own = {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": kinds}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
