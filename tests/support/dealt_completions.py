"""Completions that do not depend on how they are dealt to processes."""

import torch


def generate_by_prompt(trainer, length=None):
    """Stands for the model's `generate`: completions depend on the prompt, the step and the place in the group.

    With a length all have so many tokens.
    """
    tokenizer, words = trainer.processing_class.tokenizer, "the circle is blue red teal"
    of_words = torch.tensor(tokenizer(f"{words} A B C D").input_ids)

    def completion(random):
        if length is not None:
            return of_words[torch.randint(len(of_words), (length - 1,), generator=random)].tolist()
        letter = "ABCD"[int(torch.randint(4, (), generator=random))]
        thought = " ".join(words.split()[: 2 + int(torch.randint(4, (), generator=random))])
        return tokenizer(f"<think>{thought}</think><answer>{letter}</answer>").input_ids

    def generate(input_ids, generation_config, **kwargs):
        first, completions = trainer.accelerator.process_index * len(input_ids), []
        for row, ids in enumerate(input_ids):
            place = (first + row) % trainer.num_generations if generation_config.do_sample else 0
            seed = int(ids.sum()) * 31 + trainer.state.global_step * 977 + place
            completions.append([*completion(torch.Generator().manual_seed(seed)), tokenizer.eos_token_id])
        longest = max(map(len, completions))
        padded = [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in completions]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    return generate
