"""The trainer's loop: samples in, updates, versions out."""
