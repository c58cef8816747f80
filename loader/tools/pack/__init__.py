"""`teneral pack`: a model directory becomes an artifact."""
