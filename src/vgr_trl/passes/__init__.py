"""Forward passes of a run: what each is for, the tokens and rows it runs on, and what is wrapped around it."""
