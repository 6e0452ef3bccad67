from .programs import from_jax as from_jax, from_stablehlo as from_stablehlo
