"""Drill without images or sentences: options, then words, each followed by the letter it stands behind.

`A. red B. blue C. green D. teal | green C red A …`. A sequence asks many times, so the model gets many errors to learn
from for one list of options; the words are any tokens, so it cannot know an answer by heart.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vgr_trl.data.prompts import LETTERS


class LookupDrill:
    """Sequences of shuffled options and queries, made of the tokens of a processor."""

    def __init__(self, processor: Any, *, options: int = 4, queries: int = 16, words: int = 64, seed: int = 0) -> None:
        """Collect the tokens.

        Args:
            processor: whose tokens stand for the words.
            options: per sequence, 2 to 10.
            queries: per sequence; with repetition, so that no answer follows from those before it.
            words: how many tokens serve as words; more take longer to learn, few would be learned by heart.
            seed: of the sequences.
        """
        tokenizer = processor.tokenizer
        self.letters = torch.tensor([tokenizer(letter)["input_ids"][0] for letter in LETTERS[:options]])
        self.newline, self.dot = (tokenizer(text)["input_ids"][0] for text in ("\n", "."))
        reserved = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, self.newline, self.dot}
        reserved |= {tokenizer(letter)["input_ids"][0] for letter in LETTERS}
        free = [token for token in reversed(range(len(tokenizer))) if token not in reserved]  # whole words come last
        self.words = torch.tensor(free[:words])
        self.options, self.queries = options, queries
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids, (size, S), and labels of the same shape, -100 wherever no letter is asked for."""
        words = torch.rand(size, len(self.words), generator=self.generator).topk(self.options).indices
        words = self.words[words]  # (size, options)
        letters = self.letters.expand(size, -1)
        newline, dot = torch.full_like(words, self.newline), torch.full_like(words, self.dot)
        listed = torch.stack([newline, letters, dot, words], dim=2).flatten(1)
        asked = torch.randint(self.options, (size, self.queries), generator=self.generator)
        answers = torch.stack([words.gather(1, asked), letters.gather(1, asked)], dim=2).flatten(1)
        ids = torch.cat([listed, answers], dim=1)
        labels = torch.full_like(ids, -100)
        labels[:, listed.shape[1] + 1 :: 2] = ids[:, listed.shape[1] + 1 :: 2]
        return ids, labels

    def loss(self, model: Any, size: int) -> torch.Tensor:
        """Return the mean loss, in nats, over the letters of a new batch."""
        ids, labels = (tensor.to(model.device) for tensor in self.batch(size))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
