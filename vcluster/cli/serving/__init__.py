"""The words and the texts of serving: the command `serve`, and ``--cache`` of `simulate` and `plan`."""
