"""From a whole program to what one device runs: layouts, stages of a pipeline."""
