"""A device that moves nothing and records everything."""
