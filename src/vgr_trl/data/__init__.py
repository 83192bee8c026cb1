"""How a data set becomes prompts: one schema for rows, one way to write a question down, checked images."""
