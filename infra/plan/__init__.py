"""Plans: the cold share, first-token times and cost of a pool under a trace of arrivals, before it runs."""
