"""What TRL, transformers and vLLM get wrong, one fault per file: its link, and what makes the file removable."""
