"""The `config.json` of Hugging Face's causal language models, read as a `TransformerSpec`."""
