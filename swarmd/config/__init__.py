"""Settings: the schema, and reading it from TOML, the environment and flags."""
