from .quantities import WIDTH as WIDTH, given_seconds as given_seconds, in_columns as in_columns
