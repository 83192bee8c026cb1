"""Records of rollouts, the report, tables and logs made of them."""
