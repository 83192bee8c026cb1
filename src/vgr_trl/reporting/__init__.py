"""What a person sees of a run: records of rollouts, and the logs and pages made of them."""
