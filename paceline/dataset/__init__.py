"""Where prompts come from: files in verl's schema and reasoning-gym data sets, row by row. Floor 3."""
