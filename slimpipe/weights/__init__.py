"""Weights from elsewhere and for elsewhere: where a run starts from, and Hugging Face's files of Llama models.

`safetensors_file` reads and writes the format; `llama_names` and `llama_config` say what is called what there and here;
`source` gives any part of a weight, whatever it comes from; `convert` is `slimpipe convert`.
"""

from slimpipe.weights.convert import convert
from slimpipe.weights.errors import WeightsError
from slimpipe.weights.source import Source, open_source

__all__ = ["Source", "WeightsError", "convert", "open_source"]
