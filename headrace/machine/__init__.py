"""Memory tiers, lanes and ranks of a machine, described as data. No torch."""
