"""The heart: how a version of the weights gets from the trainer to all replicas, or to none."""
