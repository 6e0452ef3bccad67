from .reshard_op import layout_text as layout_text
