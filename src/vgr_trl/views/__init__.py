"""Views of a row: perturbed images, regions, and the prompts and turns they stand in."""
