"""Completions that do not depend on how they are dealt to processes."""

import torch
from transformers import GenerationConfig


def generate_by_prompt(trainer):
    """Stands for the model's `generate`: completions depend on the prompt, the step and the place in the group."""

    def generate(input_ids, generation_config: GenerationConfig, **kwargs):
        first = trainer.accelerator.process_index * len(input_ids)
        texts = []
        for row, ids in enumerate(input_ids):
            place = (first + row) % trainer.num_generations if generation_config.do_sample else 0
            seed = int(ids.sum()) * 31 + trainer.state.global_step * 977 + place
            random = torch.Generator().manual_seed(seed)
            letter = "ABCD"[int(torch.randint(4, (), generator=random))]
            words = "the circle is blue red teal".split()[: 2 + int(torch.randint(4, (), generator=random))]
            texts.append(f"<think>{' '.join(words)}</think><answer>{letter}</answer>")
        tokenizer = trainer.processing_class.tokenizer
        completions = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
        length = max(map(len, completions))
        padded = [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids in completions]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    return generate
