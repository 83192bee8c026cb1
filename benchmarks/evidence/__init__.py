"""A better look as teacher, with a language model that has learned to speak."""
