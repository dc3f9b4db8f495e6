"""The front door: parses, checks, prints and exits. The only place that prints."""
