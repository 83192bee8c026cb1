"""A rollout of a tiny Qwen2.5-VL, as verl and EasyR1 hold it: prompts padded on the left, responses on the right."""

import inspect

import torch
from PIL import Image

from vgr_trl.demo.tiny_model import build_tiny_vlm

WORDS = "what colour is this red green blue yellow which of them do you see here"
GROUP, LENGTH = 2, 5
SCORES = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.2, 0.9]  # of four prompts, one of whose groups is dead without other rewards
CLIP, LEARNING_RATE = (0.2, 0.28), 0.01
STEP = 3  # of the optimizer, for the perturbed images


def tiny_model():
    """Model and processor with weights of a sensible size, the same with every release of torch and transformers."""
    model, processor = build_tiny_vlm([WORDS], hidden_size=32, num_layers=4, num_heads=2)
    for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.ndim >= 2:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data = noise * parameter[0].numel() ** -0.5
    return model, processor


def chats(prompts):
    texts = ["what colour is this", "which of them do you see here"] * (prompts // 2)
    return [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}] for text in texts]


def rollout(model, processor, prompts=2):
    """Tensors (N, ...) of `prompts` questions with two responses of unequal length each, and pixel inputs per row."""
    said = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats(prompts)]
    images = [picture(number) for number in range(prompts)]
    processor.tokenizer.padding_side = "left"
    inputs = dict(processor(text=said, images=[[image] for image in images], return_tensors="pt", padding=True))
    pixels = [
        dict(processor.image_processor(images=[image], return_tensors="pt")) for image in images for _ in range(GROUP)
    ]
    generator = torch.Generator().manual_seed(5)
    count = prompts * GROUP
    words = processor.tokenizer(WORDS)["input_ids"]
    lengths = torch.arange(count) % 3 + LENGTH - 2
    response_mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    responses = torch.tensor(words)[torch.randint(len(words), (count, LENGTH), generator=generator)]
    responses = responses.masked_fill(response_mask == 0, processor.tokenizer.pad_token_id)
    prompt_ids = inputs["input_ids"].repeat_interleave(GROUP, 0)
    prompt_mask = inputs["attention_mask"].repeat_interleave(GROUP, 0)
    input_ids = torch.cat([prompt_ids, responses], 1)
    attention_mask = torch.cat([prompt_mask, response_mask], 1)
    grid = inputs["image_grid_thw"].repeat_interleave(GROUP, 0)
    return {
        "prompts": prompt_ids, "responses": responses, "response_mask": response_mask, "input_ids": input_ids,
        "attention_mask": attention_mask, "position_ids": positions(model, input_ids, attention_mask, grid),
    }, pixels  # fmt: skip


def picture(seed):
    noise = torch.randint(0, 256, (56, 56, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def positions(model, input_ids, attention_mask, grid):
    """(N, 4, S): of text, and time, height and width, as both trainers make them."""
    more = {}
    if "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters:
        more["mm_token_type_ids"] = (input_ids == model.config.image_token_id).long()
    rope, _ = model.model.get_rope_index(
        input_ids=input_ids, image_grid_thw=grid, attention_mask=attention_mask, **more
    )  # (3, N, S)
    text = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return torch.cat([text[None], rope]).transpose(0, 1).contiguous()
