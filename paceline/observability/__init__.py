"""The window: one event log, and everything a person sees as folds over it.

`event_log` and `rollout_log` write facts, `reader` reads them; `summary`, `progress` and `ledger` are pure folds; the
displays (`console`, `plain_lines`, `tensorboard_log`) show them. No loop reads anything from here, and nothing here
influences a run.
"""
