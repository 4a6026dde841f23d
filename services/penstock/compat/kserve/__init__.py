"""KServe's protocol, which Triton's clients speak, in front of the router's Generate."""
