"""Statistics that the analyses share: resampling by cluster, ranks, paired tests, chance at a quota."""
