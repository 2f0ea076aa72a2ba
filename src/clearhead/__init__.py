"""Four repairs of the Transformer, to build, train, measure and compare."""
