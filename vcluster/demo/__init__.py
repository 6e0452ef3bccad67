"""The demos: small models and collectives, run on a cluster and explained."""
