"""This machine as a described hardware, measured."""
