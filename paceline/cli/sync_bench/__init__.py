"""What `paceline bench sync` is made of: the processes it starts, the engine's road and its peers, and the figures."""
