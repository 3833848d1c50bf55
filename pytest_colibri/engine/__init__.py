"""The reference engine: a real forward pass over three real tiers, run as its own process."""
