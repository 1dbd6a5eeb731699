"""The run file: reads YAML and overrides, fills in `auto`, builds and runs."""
