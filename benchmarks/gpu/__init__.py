"""What runs on a GPU: `plan` says what is measured, `bench`, `steps` and `effect` measure, `report` shows it."""
