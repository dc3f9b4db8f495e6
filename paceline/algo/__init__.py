"""Learning arithmetic: advantages of a group, the clipped policy loss, their sum. Floor 1."""
