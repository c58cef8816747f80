"""Computing with torch: the reference, what the native core lacks, and what a GPU builds on."""
