"""The demos: ``python -m vcluster.demo`` lists them."""
