"""Run vision towers less: images processed once, features kept, windows attended in one call, a dummy image."""
