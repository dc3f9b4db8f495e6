"""The sections of the configuration, one module per component; `core.config` is the whole."""
