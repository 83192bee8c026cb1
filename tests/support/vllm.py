"""What is put in place of vLLM where it is not installed."""

from types import SimpleNamespace


class NoVLLM:
    """TRL's `VLLMGeneration`, colocated, without weights; notes when it is told to forget images."""

    mode = "colocate"

    def __init__(self, *args, **kwargs):
        self.done = []
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(reset_encoder_cache=lambda: self.done.append("forget")))

    def sync_weights(self):
        self.done.append("sync")
