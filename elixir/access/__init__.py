"""Who reads which weight when: the one interception that tracer and runtime listen to."""
