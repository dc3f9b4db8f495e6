"""The public test kit: virtual clock, marker model, recording fakes. For authors of engines, trainers and checkpoint
engines.
"""
