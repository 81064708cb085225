"""Settings: their schema, and reading them from TOML, the environment and flags."""
