"""Repairs of faults in TRL, transformers, vLLM and gloo, a file for each: with a link, and when it can be removed."""
