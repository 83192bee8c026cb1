"""What runs on a GPU in one command: `plan` says what is measured, `bench` and `kernels` measure, `report` shows it."""
