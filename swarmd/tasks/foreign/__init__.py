"""Tasks of other projects as own tasks: tasksets of verifiers, and tasks of lm-evaluation-harness."""
