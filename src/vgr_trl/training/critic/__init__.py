"""A critic beside the policy: values of tokens, the advantages that are made of them, and how they are learned.

Read `values.py` (a head on the policy's hidden states, or a model), `critic.py` (the stage), then `learning.py` (its
optimizer).
"""
