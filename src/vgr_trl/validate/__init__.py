"""What is checked and planned before the first generation: options, data, and what passes share and skip."""
