"""Memory plans are held against what was sampled."""
