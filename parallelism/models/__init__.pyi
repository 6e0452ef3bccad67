from ..serving.generation import generate as generate
from .convolutions import convolution as convolution, convolutional as convolutional
from .expert_layers import Experts as Experts
from .experts import mixture as mixture
from .hugging_face.reading import from_config as from_config
from .latent_attention import LatentAttention as LatentAttention
from .layers import (
    attention as attention,
    cross_entropy as cross_entropy,
    dropout as dropout,
    rotary as rotary,
)
from .linear_attention import LinearAttention as LinearAttention
from .lora import LoRA as LoRA
from .perceptron import mlp as mlp
from .plain_gpt import gpt as gpt
from .published import TRANSFORMERS as TRANSFORMERS, transformer as transformer
from .spec import TransformerSpec as TransformerSpec
