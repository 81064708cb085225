"""The client's side of judges: being evaluated, and reading the data that judges publish."""
