"""Text to tokens and back for processes that need neither torch nor transformers. Floor 3."""
